"""Stochastic rounding: right in the mean, and drawn alike however a parameter is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dhp.parallel.optim.chunked_adamw import draw_halves, draw_key, round_stochastically

CPU = torch.device("cpu")
KEY = draw_key(0, "layer.weight", 1)


def drawn(shape: tuple[int, ...], key: int = KEY) -> tuple[Tensor, Tensor]:
    return draw_halves((0,) * len(shape), shape, shape, key, CPU)


def by_hand(index: int, key: int) -> tuple[int, int]:
    """The mixer in whole numbers without a bound."""
    bits = index ^ key
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        bits = ((bits ^ (bits >> shift)) * factor) % 2**32
    bits ^= bits >> 15
    return bits % 2**16, bits >> 16


def test_every_element_has_the_numbers_of_its_place() -> None:
    first, second = drawn((3, 5, 7))
    for index in range(3 * 5 * 7):
        assert (int(first.flatten()[index]), int(second.flatten()[index])) == by_hand(index, KEY)


def test_beyond_32_bits_of_elements_places_begin_anew() -> None:
    first, _ = draw_halves((2**16, 5), (1, 2), (2**17, 2**16), KEY, CPU)
    assert first.flatten().tolist() == [by_hand(5, KEY)[0], by_hand(6, KEY)[0]]


@pytest.mark.parametrize("block", [((0, 0), (9, 11)), ((4, 0), (5, 11)), ((2, 3), (6, 2))])
def test_a_block_has_the_numbers_of_the_whole(block: tuple[tuple[int, int], tuple[int, int]]) -> None:
    (top, left), (rows, columns) = block
    for part, whole in zip(draw_halves((top, left), (rows, columns), (9, 11), KEY, CPU), drawn((9, 11)), strict=True):
        assert torch.equal(part, whole[top : top + rows, left : left + columns])


def test_numbers_are_even_and_independent() -> None:
    halves = [half.double() / 2**16 for half in drawn((1 << 18,))]
    for half in halves:
        counts = torch.histc(half, 64, 0, 1)
        expected = (1 << 18) / 64
        assert float(((counts - expected) ** 2 / expected).sum()) < 120  # chi squared of 63: above once in 10⁵
        neighbours = torch.corrcoef(torch.stack([half[:-1], half[1:]]))[0, 1]
        assert abs(float(neighbours)) < 0.01
    assert abs(float(torch.corrcoef(torch.stack(halves))[0, 1])) < 0.01


@pytest.mark.parametrize("other", [(1, "layer.weight", 1), (0, "layer.bias", 1), (0, "layer.weight", 2)])
def test_another_seed_parameter_or_step_draws_others(other: tuple[int, str, int]) -> None:
    assert draw_key(0, "layer.weight", 1) == KEY
    same = drawn((1 << 12,))[0] == drawn((1 << 12,), draw_key(*other))[0]
    assert int(same.sum()) < 10


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounded_up_as_often_as_the_distance_says(share: float, sign: float) -> None:
    values = torch.full((1 << 16,), sign * (1 + share * 2**-7))
    rounded = round_stochastically(values, drawn((1 << 16,))[0])
    assert rounded.dtype == torch.bfloat16
    assert set(rounded.float().unique().tolist()) <= {sign, sign * (1 + 2**-7)}
    assert float((rounded.float() != sign).double().mean()) == pytest.approx(share, abs=0.01)


def _average(rounded: bool) -> float:
    """An average with beta 0.999 of squares that fell from 1 to 0, after 2000 steps, mean of many."""
    values = torch.ones(1 << 10, dtype=torch.bfloat16)
    for step in range(2000):
        wide = values.float() * 0.999
        halves = draw_halves((0,), (1 << 10,), (1 << 10,), draw_key(0, "w", step), CPU)
        values = round_stochastically(wide, halves[1]) if rounded else wide.to(torch.bfloat16)
    return float(values.float().mean())


def test_an_average_that_stands_still_when_rounded_to_nearest_falls_as_it_should() -> None:
    exact = 0.999**2000
    assert _average(rounded=False) > 0.99  # never moves
    assert _average(rounded=True) == pytest.approx(exact, rel=0.01)
