"""experiments.families: ways in turn on the same samples, and their ratio."""

from typing import Any

import pytest

from experiments.families.__main__ import WARM_UP, compare
from tests.helpers.figures import rows
from tests.helpers.tiny_families import FAMILIES


class Way:
    def __init__(self, seconds: float, loss: float = 2.0):
        self._seconds, self._loss, self.steps = seconds, loss, 0

    def shard(self, samples: Any) -> Any:
        return samples

    def step(self, _: Any) -> tuple[float, float]:
        self.steps += 1
        return self._seconds, self._loss


class Steps:
    def step(self, number: int) -> int:
        return number


def test_ways_run_as_often_and_the_first_rounds_are_left_out() -> None:
    ways = {"dhp": Way(1.0), "plain": Way(3.0)}
    assert compare(ways, Steps(), 4) == {"dhp": [1.0] * 4, "plain": [3.0] * 4}  # type: ignore[arg-type]
    assert [way.steps for way in ways.values()] == [WARM_UP + 4] * 2


def test_ways_that_learn_other_things_are_not_compared() -> None:
    with pytest.raises(ValueError, match="other losses"):
        compare({"dhp": Way(1.0), "plain": Way(1.0, 2.1)}, Steps(), 1)  # type: ignore[arg-type]


def test_the_rows_are_of_every_declared_family() -> None:
    found = rows("families_speed")
    assert {(row["family"], row["samples"]) for row in found} == {(n, s) for n in FAMILIES for s in ("mixed", "even")}
