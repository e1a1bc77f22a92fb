"""Layers that carry state along a row, in numbers: what of them ranks can share (`dhp.parallel.attention.mixers`)."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mixer:
    """heads: that ranks share out, or channels where there are none. values: of a token, that go to the ranks of their
    heads and come back."""

    heads: int
    values: int


def find_mixer(name: str, text: Any) -> Mixer | None:
    """Of a class of a decoder of that text configuration; None: how ranks share it is not known here."""
    if name in DELTA_NETS:
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        return Mixer(text.linear_num_key_heads, 2 * (keys + values + text.linear_num_value_heads))
    return Mixer(text.hidden_size, 2 * text.hidden_size) if name in SHORT_CONVOLUTIONS else None


DELTA_NETS = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
SHORT_CONVOLUTIONS = ("Lfm2ShortConv", "Lfm2MoeShortConv")
KINDS = frozenset({"linear_attention", "conv"})  # of layers that have one in the place of attention
