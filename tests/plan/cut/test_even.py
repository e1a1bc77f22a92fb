"""Cuts that are even in one figure, against all cuts."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from dhp.core.errors import ConfigError
from dhp.plan.cut.bmp import by_layers, by_parameters
from dhp.plan.cut.problem import PartitionProblem
from dhp.plan.cut.units import Unit
from experiments.baselines import by_profile
from tests.plan.cut.made import chain, cuts_of, programs, unit

Value = Callable[[Unit], float]


def sums(units: Sequence[Unit], cuts: tuple[int, ...], value: Value) -> list[float]:
    ends = [0, *cuts, len(units)]
    return [sum(map(value, units[a:b])) for a, b in zip(ends, ends[1:])]


@pytest.mark.parametrize("runs", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_more_even(seed: int, runs: int) -> None:
    units = chain(seed, 11)
    every = cuts_of(PartitionProblem(units, programs(runs, 1)))
    size: Value = lambda one: one.parameters
    largest = max(sums(units, by_parameters(units, runs), size))
    assert largest == min(max(sums(units, cuts, size)) for cuts in every)
    cases: list[tuple[Callable[..., tuple[int, ...]], Value]] = [
        (by_layers, lambda one: one.layers),
        (by_profile, lambda one: one.forward_s),
    ]
    for method, value in cases:
        spread = np.var(sums(units, method(units, runs), value))
        assert spread == pytest.approx(min(np.var(sums(units, cuts, value)) for cuts in every), abs=1e-12)


def test_the_three_are_different() -> None:
    units = chain(2, 11)
    assert len({by_parameters(units, 3), by_layers(units, 3), by_profile(units, 3)}) == 3


def test_of_cuts_as_even_the_first_stages_are_smallest() -> None:
    assert by_parameters([unit() for _ in range(5)], 2) == (2,)
    assert by_layers([unit() for _ in range(5)], 2) == (2,)


def test_more_runs_than_places_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"1 places to cut cannot be cut into 3 runs"):
        by_layers([unit(), unit()], 3)
