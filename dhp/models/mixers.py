"""Layers that carry state along a row, in numbers: what of them ranks can share (`dhp.parallel.attention.mixers`)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mixer:
    """heads: that ranks share out, or channels where there are none. values: of a token, that go to the ranks of their
    heads and come back. border: inputs of a convolution that a token sees before itself. state: numbers of
    all heads by which a piece of a row changes the state before it, what it adds and a matrix, and of that state."""

    heads: int
    values: int
    border: int
    state: int = 0


def divide_heads(mixers: Iterable[Mixer], ranks: int) -> bool:
    """Whether so many ranks share the heads of all of these evenly."""
    return all(one.heads % ranks == 0 for one in mixers)


def find_mixer(name: str, text: Any) -> Mixer | None:
    """Of a class of a decoder of that text configuration; None: how ranks share it is not known here."""
    if name in DELTA_NETS:
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        exchanged = 2 * (keys + values + text.linear_num_value_heads)
        width = text.linear_key_head_dim
        state = text.linear_num_value_heads * width * (width + 2 * text.linear_value_head_dim)
        return Mixer(text.linear_num_key_heads, exchanged, text.linear_conv_kernel_dim - 1, state)
    if name in SHORT_CONVOLUTIONS:
        return Mixer(text.hidden_size, 2 * text.hidden_size, text.conv_L_cache - 1)
    return None


DELTA_NETS = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
SHORT_CONVOLUTIONS = ("Lfm2ShortConv", "Lfm2MoeShortConv")
KINDS = frozenset({"linear_attention", "conv"})  # of layers that have one in the place of attention
