"""Stochastic rounding to bfloat16 (Gupta et al. 2015, section 3.1), the same in every layout and after a resume.

An average that moves by less than half a last place a step, as that of squares with beta 0.999 does, stays where it is
when it is rounded to nearest. Rounded up as often as the distance says, it is right in the mean.

What decides is a function of the run's seed, the step, the parameter's name and the element's place in the whole
parameter: no generator has a state, and a rank draws for its rows what one process would.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

_MASK = (1 << 32) - 1
# Shifts and factors of a mixer of 32 bits, by Wellons' hash-prospector. Factors below 2³¹, so that no product of int64
# overflows.
_ROUNDS = ((16, 0x21F0AAAD), (15, 0x735A2D97))
_LAST_SHIFT = 15


def draw_key(seed: int, name: str, step: int) -> int:
    """32 bits that are another number for each seed, parameter and step."""
    return int.from_bytes(blake2b(f"{seed} {step} {name}".encode(), digest_size=4).digest(), "little")


def draw_halves(
    offset: Sequence[int], shape: Sequence[int], whole: Sequence[int], key: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Two independent whole numbers from 0 to 2¹⁶ - 1, int32, for each element of the block of `shape` that begins at
    `offset` in a parameter of shape `whole`."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for axis, (begin, count) in enumerate(zip(offset, shape, strict=True)):
        along = torch.arange(begin, begin + count, device=device) * prod(whole[axis + 1 :])
        index = index + along.view(-1, *[1] * (len(shape) - axis - 1))
    bits = (index & _MASK).bitwise_xor_(key)
    for shift, factor in _ROUNDS:
        bits.bitwise_xor_(bits >> shift).mul_(factor).bitwise_and_(_MASK)
    bits.bitwise_xor_(bits >> _LAST_SHIFT)
    return (bits & 0xFFFF).to(torch.int32), (bits >> 16).to(torch.int32)


def round_stochastically(values: Tensor, drawn: Tensor) -> Tensor:
    """Finite float32 numbers as bfloat16: away from 0 where what is cut off, in 2⁻¹⁶ of the last place, and `drawn`,
    whole numbers below 2¹⁶, give one together; else towards 0."""
    upper = (values.contiguous().view(torch.int32) + drawn) >> 16
    return upper.to(torch.int16).view(torch.bfloat16)
