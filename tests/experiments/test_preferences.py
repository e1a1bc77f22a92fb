"""experiments.preferences: pairs with pictures, and steps in turns."""

from pathlib import Path
from typing import Any

from dhp.core.preferences import CHOSEN, REJECTED
from experiments.loops import save_model
from experiments.preferences.__main__ import WARM_UP, Pairs, compare
from tests.helpers.figures import one


class Way:
    def __init__(self, seconds: float):
        self._seconds, self.steps = seconds, 0

    def shard(self, samples: Any) -> Any:
        return samples

    def step(self, _: Any) -> tuple[float, float]:
        self.steps += 1
        return self._seconds, 1.0


class Steps:
    def step(self, number: int) -> int:
        return number


def test_ways_run_as_often_and_the_first_rounds_are_left_out() -> None:
    ways = {"dpo": Way(1.0), "sft": Way(2.0)}
    assert compare(ways, Steps(), 3) == {"dpo": [1.0] * 3, "sft": [2.0] * 3}  # type: ignore[arg-type]
    assert [way.steps for way in ways.values()] == [WARM_UP + 3] * 2


def test_both_sides_show_the_same_and_say_another(tmp_path: Path) -> None:
    pairs = Pairs(save_model("qwen2_5_vl", tmp_path))
    first, again = pairs.step(3), pairs.step(3)
    for pair, same in zip(first[0], again[0], strict=True):
        assert pair.sides is not None and same.sides is not None
        chosen, rejected = pair.sides
        assert chosen.mark is not None and rejected.mark is not None
        assert (chosen.mark.side, rejected.mark.side) == (CHOSEN, REJECTED) and rejected.again
        assert chosen.mark.reference < 0 and chosen.mark == same.sides[0].mark
        before = int((chosen.labels < 0).sum())
        assert (chosen.input_ids[:before] == rejected.input_ids[:before]).all()
        assert len(chosen.grids) == len(rejected.grids) == len(pair.grids)


def test_the_row_on_record_is_of_equal_losses() -> None:
    row = one("preferences")
    assert max(row[f"{name}_error"] for name in ("dpo", "kto", "orpo")) < 1e-6 and row["as_it_is"] < 1e-5
