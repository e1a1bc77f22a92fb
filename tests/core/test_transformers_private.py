"""Canaries: transformers' private names are what dhp takes them for, and stand in one file."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlavaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForConditionalGeneration,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.utils.deprecation import deprecate_kwarg

from dhp.core import transformers_private

ROOT = Path(__file__).parents[2]


def test_they_stand_in_one_file() -> None:
    names = (
        r"_model_mapping|_extra_content|_internal\b|_expand_parallel_plan|\b_tp_plan|_tied_weights_keys|_encode_plus"
        "|_keys_to_ignore"
    )
    found = [str(f.relative_to(ROOT)) for f in (ROOT / "dhp").rglob("*.py") if re.search(names, f.read_text())]
    assert found == ["dhp/core/transformers_private.py"]


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.device("meta"):
        return Qwen2ForCausalLM(Qwen2Config(vocab_size=16, num_key_value_heads=2, tie_word_embeddings=True, **sizes))


def test_what_is_behind_the_properties_is_what_they_read(model: Qwen2ForCausalLM) -> None:
    transformers_private.set_attention(model.config, "made_up")
    assert model.config._attn_implementation == "made_up"
    transformers_private.set_attention(model.config, "sdpa")
    transformers_private.set_experts(model.config, "eager")
    assert model.config._experts_implementation == "eager"


def test_auto_classes_know_their_configurations() -> None:
    assert transformers_private.has_class(AutoModelForImageTextToText, LlavaConfig)
    assert not transformers_private.has_class(AutoModelForImageTextToText, SimpleNamespace)
    assert transformers_private.class_of(AutoModelForCausalLM, Qwen2Config) is Qwen2ForCausalLM
    assert isinstance(transformers_private.registered_classes(AutoModelForImageTextToText), list)


def test_a_plan_is_expanded_and_replaced(model: Qwen2ForCausalLM) -> None:
    expanded = transformers_private.expand_plan(model, {"model.layers.*.mlp.up_proj": "colwise"})
    assert {str(name) for name in expanded} >= {"model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"}
    before = transformers_private.tensor_plan(model)
    transformers_private.set_tensor_plan(model, {**before, "made": "rowwise"})
    assert transformers_private.tensor_plan(model)["made"] == "rowwise"
    transformers_private.set_tensor_plan(model, before)


def test_weights_that_are_one(model: Qwen2ForCausalLM) -> None:
    assert "lm_head.weight" in dict(transformers_private.ties_of(model))
    assert getattr(type(model), transformers_private.TIED_KEYS) is not None


def test_patterns_of_keys_that_a_class_does_not_load() -> None:
    assert transformers_private.ignored_patterns(Qwen3_5ForConditionalGeneration) == ["^mtp.*"]
    assert transformers_private.ignored_patterns(Qwen2ForCausalLM) == []


def test_weights_that_files_lack(model: Qwen2ForCausalLM) -> None:
    assert transformers_private.unsaved_names(model) == set()
    model._keys_to_ignore_on_save = {"model.norm.weight"}
    model.tie_weights()
    assert transformers_private.unsaved_names(model) == {"model.norm.weight"}
    model._keys_to_ignore_on_save = set()


def test_a_tokenizer_that_changes_its_call_is_known() -> None:
    made = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    plain = PreTrainedTokenizerFast(tokenizer_object=made)
    assert transformers_private.encodes_as(plain, PreTrainedTokenizerFast)
    assert plain("abb", add_special_tokens=False)["input_ids"] == plain.backend_tokenizer.encode("abb").ids == [2, 1]
    changed = type("Changed", (PreTrainedTokenizerFast,), {"__call__": lambda self, text: text})
    inside = type("Inside", (PreTrainedTokenizerFast,), {"_encode_plus": lambda self, text: text})
    for own in (changed, inside):
        assert not transformers_private.encodes_as(own(tokenizer_object=made), PreTrainedTokenizerFast)


def test_decorators_that_only_rename_are_told_from_others() -> None:
    attention = transformers_private.renamed_inner(Qwen2Attention.forward)
    assert attention is Qwen2Attention.forward.__wrapped__ and "cache" in attention.__code__.co_varnames
    kept = torch.no_grad()(lambda states: states)
    assert transformers_private.renamed_inner(kept) is kept


def test_what_is_put_inside_of_them_still_has_its_old_names() -> None:
    @deprecate_kwarg("older", "99", new_name="old")
    @deprecate_kwarg("old", "99", new_name="new")
    def before(states: int, new: int = 0) -> tuple[str, int, int]:
        return "before", states, new

    def after(states: int, new: int = 0) -> tuple[str, int, int]:
        return "after", states, new

    again = transformers_private.with_renamed_inner(before, after)
    with pytest.warns(FutureWarning, match="`old` is deprecated"):
        assert again(1, old=2) == ("after", 1, 2) and before(1, old=2) == ("before", 1, 2)
    with pytest.warns(FutureWarning):
        assert again(1, older=3) == ("after", 1, 3)
    assert transformers_private.renamed_inner(again) is after
    assert transformers_private.with_renamed_inner(after, before) is before
