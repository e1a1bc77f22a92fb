"""Long samples and short ones in steps of their own."""

import numpy as np
import pytest

from dhp.data.balance.methods import BALANCE_METHODS as METHODS
from dhp.data.balance.methods import choose_method
from dhp.data.balance.packs import Limits, Loads

RNG = np.random.default_rng(3)
TEXT = np.where(RNG.random(3000) < 0.1, RNG.integers(2000, 8000, 3000), RNG.integers(20, 1200, 3000))
LOADS = Loads(TEXT // 3, TEXT)
LIMITS = Limits(vision=3000, text=8000)
LONG = 2000


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("rows", [1, 6])
def test_no_step_has_both_but_the_last(name: str, rows: int) -> None:
    packs = choose_method(name, LONG)(LOADS, LIMITS, rows, 0)
    assert np.array_equal(np.sort(packs.samples), np.arange(len(LOADS)))
    kinds = [TEXT[packs.pack(number)] >= LONG for number in range(len(packs))]
    assert all(kind.all() or not kind.any() for kind in kinds)
    whole = len(packs) // rows - 1
    mixed = [step for step in range(whole) if len({kinds[step * rows + row][0] for row in range(rows)}) > 1]
    assert not mixed
    of_steps = [bool(kinds[step * rows][0]) for step in range(whole)]
    assert any(of_steps[: whole // 2]) and not all(of_steps[: whole // 2])  # in random order


def test_rows_of_short_samples_are_as_even_as_without_long_ones() -> None:
    short = np.flatnonzero(TEXT < LONG)
    packs = choose_method("balanced", LONG)(LOADS, LIMITS, 4, 0)
    alone = METHODS["balanced"](Loads(LOADS.vision[short], TEXT[short]), LIMITS, 4, 0)
    sums = [int(TEXT[packs.pack(n)].sum()) for n in range(len(packs)) if TEXT[packs.pack(n)[0]] < LONG]
    assert sorted(sums) == sorted(alone.sums(TEXT[short]).tolist())


def test_samples_of_one_kind_are_packed_as_ever() -> None:
    few = Loads(LOADS.vision[:40], np.full(40, 50))
    packs = choose_method("balanced", LONG)(few, LIMITS, 4, 0)
    assert np.array_equal(np.sort(packs.samples), np.arange(40))
