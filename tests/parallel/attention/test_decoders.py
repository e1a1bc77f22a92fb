"""Decoders whose rows are shared equal whole ones."""

import ast
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    Cohere2Config,
    Cohere2Model,
    Exaone4Config,
    Exaone4Model,
    Gemma2Config,
    Gemma2Model,
    Gemma3TextConfig,
    Gemma3TextModel,
    GptOssConfig,
    GptOssModel,
    Llama4TextConfig,
    Llama4TextModel,
)
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.cohere2 import modeling_cohere2
from transformers.models.exaone4 import modeling_exaone4
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.llama4 import modeling_llama4
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_vl import modeling_qwen3_vl

from dhp.core.errors import ModelError
from dhp.parallel.attention.segment_plan import plan_segments
from dhp.parallel.attention.segments import packed_attention
from dhp.parallel.attention.visibility import number_runs
from tests.helpers.double import PACKED, SMALL, alone, largest_error, make_decoder, packed, samples_of, stay_in_double

LENGTHS = (9, 3, 14, 9, 1)  # shorter and longer than the window and the chunk, which are 4 and 5
SLIDING = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


def gemma3() -> Any:
    return make_decoder(Gemma3TextModel, Gemma3TextConfig(**SMALL, **SLIDING))


def gemma2() -> Any:
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": None}
    return make_decoder(Gemma2Model, Gemma2Config(**SMALL, **SLIDING, **caps))


def cohere2() -> Any:
    return make_decoder(Cohere2Model, Cohere2Config(**SMALL, **SLIDING))


def exaone4() -> Any:
    return make_decoder(Exaone4Model, Exaone4Config(**SMALL, **SLIDING, sliding_window_pattern=2))


def llama4(**others: Any) -> Any:
    config = Llama4TextConfig(
        **SMALL,
        num_hidden_layers=2,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        attention_chunk_size=5,
        moe_layers=[],
        intermediate_size_mlp=32,
        **others,
    )
    return make_decoder(Llama4TextModel, config)


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_double(monkeypatch)


@pytest.mark.parametrize("make", [gemma3, gemma2, cohere2, exaone4, llama4])
def test_a_packed_row_equals_each_sample_alone(make: Callable[[], Any]) -> None:
    model, samples = make(), samples_of(LENGTHS)
    wanted = alone(model, samples)
    assert largest_error(packed(model, samples), wanted) < 1e-11
    assert largest_error(packed(model, samples, _planted), wanted) > 1e-3


def _planted(module: Any, *states: Any, **named: Any) -> Any:
    """A window and a chunk off by one."""
    if named.get("sliding_window") is not None:
        return packed_attention(module, *states, **named | {"sliding_window": named["sliding_window"] + 1})
    size = getattr(module.config, "attention_chunk_size", None)
    if size is None:
        return packed_attention(module, *states, **named)
    module.config.attention_chunk_size = size + 1
    try:
        return packed_attention(module, *states, **named)
    finally:
        module.config.attention_chunk_size = size


@pytest.mark.parametrize("make", [gemma3, gemma2, llama4])
def test_padded_rows_equal_each_sample_alone(make: Callable[[], Any]) -> None:
    model, samples = make(), samples_of((9, 14, 3))
    tokens = torch.stack([torch.nn.functional.pad(sample[0], (0, 14 - sample.shape[1]), value=1) for sample in samples])
    wanted = alone(model, samples)[0]
    AttentionInterface.register(PACKED, packed_attention)
    model.config._attn_implementation_internal = PACKED
    plan = plan_segments((14,) * 3, torch.device("cpu"), causal=True)
    output = model(input_ids=tokens, use_cache=False, segments=plan).last_hidden_state.detach()
    found = torch.cat([row[: sample.shape[1]] for row, sample in zip(output, samples, strict=True)])
    assert largest_error([found], [wanted]) < 1e-11


# One sample with images: types of tokens as the libraries' own functions take them, 1 for an image's.
TYPES = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0]])
PREFIX = torch.tensor([[0] * 9 + [1] * 6])


def _masks(model: Any, of: Any, types: Tensor) -> dict[str, Tensor]:
    """The masks of Gemma 3 or 4 for an image."""
    numbers = of.get_block_sequence_ids_for_mask(types, device=types.device)
    return of.create_masks_for_vision_model(**_mask_arguments(model, types), block_sequence_ids=numbers)


def _prefix_masks(model: Any, types: Tensor) -> dict[str, Tensor]:
    """The masks that PaliGemma's forward makes: type 0 is the prefix."""
    named = _mask_arguments(model, types) | {"block_sequence_ids": torch.where(types == 0, 0, -1)}
    full, sliding = create_causal_mask(**named), create_sliding_window_causal_mask(**named)
    return {"full_attention": full, "sliding_attention": sliding}


def _mask_arguments(model: Any, types: Tensor) -> dict[str, Any]:
    states = torch.zeros(*types.shape, 4, dtype=torch.float64)
    positions = torch.arange(types.shape[1])[None]
    return {
        "config": model.config,
        "inputs_embeds": states,
        "attention_mask": None,
        "cache": None,
        "position_ids": positions,
    }


RULES: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "bounded": (gemma3, TYPES, lambda model: _masks(model, modeling_gemma3, TYPES)),
    "windowed": (gemma3, TYPES, lambda model: _masks(model, modeling_gemma4, TYPES)),
    "free": (gemma2, PREFIX, lambda model: _prefix_masks(model, PREFIX)),
}


@pytest.mark.parametrize("rule", RULES)
def test_blocks_equal_the_masks_of_the_libraries_own_models(rule: Any) -> None:
    make, types, masks_of = RULES[rule]
    model, (text, sample) = make(), samples_of((6, types.shape[1]))
    wanted_text, wanted = alone(model, [text]), alone(model, [sample], attention_mask=masks_of(model))
    if rule == "free":
        numbers = torch.where(types[0] == 0, 0, -1)
    else:
        numbers = number_runs(types == 1)
    for other in ("bounded", "windowed", "free"):
        blocks = torch.cat([torch.full((6,), -1), numbers])
        found = packed(model, [text, sample], blocks=blocks, block_rule=other)
        assert largest_error([found[0][:6]], wanted_text[:1]) < 1e-11
        error = largest_error([found[0][6:]], wanted[:1])
        assert error < 1e-11 if other == rule else error > 1e-3, other
    assert largest_error(packed(model, [sample], blocks=numbers, block_rule=rule), wanted) < 1e-11


def test_runs_of_image_tokens_are_numbered_as_in_the_library() -> None:
    wanted = modeling_gemma3.get_block_sequence_ids_for_mask(TYPES)[0]
    assert torch.equal(number_runs(TYPES == 1), wanted) and wanted.max() == 1
    assert number_runs(torch.ones(2, dtype=torch.bool)).tolist() == [0, 0] and len(number_runs(wanted[:0] > 0)) == 0


def test_sinks_are_refused() -> None:
    """GPT-OSS hands them over as `s_aux`."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    model = make_decoder(GptOssModel, GptOssConfig(**SMALL, **SLIDING, **experts))
    with pytest.raises(ModelError, match="GptOssAttention: .* s_aux="):
        packed(model, samples_of((3, 2)))


def test_dropout_is_refused() -> None:
    model = make_decoder(Gemma3TextModel, Gemma3TextConfig(**SMALL, **SLIDING, attention_dropout=0.5))
    with pytest.raises(ModelError, match=r"dropout=0\.5"):
        packed(model, samples_of((3, 2)))


def test_a_decoder_made_to_look_both_ways_is_refused() -> None:
    model = make_decoder(Gemma3TextModel, Gemma3TextConfig(**SMALL, **SLIDING, use_bidirectional_attention=True))
    with pytest.raises(ModelError, match="not causal"):
        packed(model, samples_of((3, 2)))


def test_scales_by_the_place_in_a_packed_row_are_refused() -> None:
    """Llama 4 counts the tokens of the row, not of the sample."""
    model, samples = llama4(attn_temperature_tuning=True, floor_scale=8), samples_of((5, 6))
    with pytest.raises(ModelError, match=r"floor_scale=8.*11 tokens.*data\.packing=false"):
        packed(model, samples)
    assert (
        largest_error(packed(model, samples[1:]), alone(model, samples[1:])) < 1e-11
    )  # one sample is a row of its own


# What each decoder hands to attention by name; a new one may change the result, and is refused until it is known.
KEYWORDS = {
    modeling_gemma2.Gemma2Attention: {"dropout", "scaling", "sliding_window", "softcap"},
    modeling_gemma3.Gemma3Attention: {"dropout", "scaling", "sliding_window"},
    modeling_gemma4.Gemma4TextAttention: {"dropout", "scaling", "sliding_window"},
    modeling_cohere2.Cohere2Attention: {"dropout", "scaling", "sliding_window"},
    modeling_exaone4.Exaone4Attention: {"dropout", "scaling", "sliding_window"},
    modeling_llama4.Llama4TextAttention: {"dropout", "scaling"},
    modeling_qwen3_5.Qwen3_5Attention: {"dropout", "scaling"},
    modeling_qwen2_5_vl.Qwen2_5_VLAttention: {"dropout", "scaling", "sliding_window", "position_ids"},
    modeling_qwen3_vl.Qwen3VLTextAttention: {"dropout", "scaling"},
}


@pytest.mark.parametrize("kind", KEYWORDS, ids=lambda kind: kind.__name__)
def test_the_library_hands_over_no_other_keywords(kind: Any) -> None:
    tree = ast.parse(inspect.getsource(kind))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (call,) = [call for call in calls if getattr(call.func, "id", "") == "attention_interface"]
    assert {word.arg for word in call.keywords if word.arg} == KEYWORDS[kind]
    assert len(call.args) == 5  # module, query, key, value, mask
