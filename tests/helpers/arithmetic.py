"""Operations of plain models, a sample at a time, under PyTorch's own counter."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from dhp.data.sample.sample import Sample


def load_plain(name: str) -> Any:
    """A model whose operations are seen: attention is written out as products of matrices, and experts one by one."""
    model = AutoModelForImageTextToText.from_pretrained(name, attn_implementation="eager").train()
    model.set_experts_implementation("eager")
    return model


def count_encoding(model: Any, family: Any, sample: Sample, number: int) -> dict[bool, float]:
    """Operations for a sample's picture of that number, forward (False) and with backward (True)."""
    return _count(lambda: _encode(model, family, sample, number))


def count_decoding(model: Any, sample: Sample, handed: bool = False) -> dict[bool, float]:
    """Operations for a sample's tokens. handed: what encoders hand over has a gradient."""
    return _count(lambda: _logits(model, sample, handed), causal=True)


def _encode(model: Any, family: Any, sample: Sample, number: int) -> Tensor:
    pixels, grid = torch.from_numpy(sample.pixels[number]), torch.tensor([sample.grids[number]])
    named = family.processor.plain_inputs({"pixel_values": pixels, "image_grid_thw": grid})
    output = model.model.get_image_features(**named, return_dict=True)
    features = [rows for level in getattr(output, "deepstack_features", ()) for rows in level]
    return torch.cat([*output.pooler_output, *features])


def _logits(model: Any, sample: Sample, handed: bool) -> Tensor:
    """Of the tokens that have a target."""
    decoder = model.model.language_model
    embedded = decoder.embed_tokens(torch.from_numpy(sample.input_ids)[None] % decoder.config.vocab_size)
    if handed and not embedded.requires_grad:
        embedded.requires_grad_()
    states = decoder(inputs_embeds=embedded, use_cache=False).last_hidden_state
    return model.lm_head(states[0, :-1][torch.from_numpy(sample.labels[1:] != -100)])


def _count(run: Callable[[], Tensor], causal: bool = False) -> dict[bool, float]:
    found = {}
    with FlopCounterMode(display=False) as counter:
        output = run()
        found[False] = _useful(counter.get_flop_counts(), causal)
        if output.requires_grad:
            output.sum().backward()
    return found | {True: _useful(counter.get_flop_counts(), causal)}


def _useful(counts: dict[str, dict[Any, int]], causal: bool) -> float:
    """Half of a causal attention's pairs see each other: of its products over all pairs half count, as in what they
    are compared with. And LLaVA computes a last layer that no output depends on."""
    attention = sum(n for operator, n in counts["Global"].items() if "bmm" in str(operator))
    assert attention
    unused = sum(counts.get("CLIPVisionModel.encoder.layers.2", {}).values())
    return sum(counts["Global"].values()) - (attention / 2 if causal else 0) - unused
