"""Dropout of adapters beside a tower of sound: alike in every layout.

The library's tower takes all clips of a sample together, so that a row has no clip there: layouts are held against one
of a single rank, which takes each clip by itself.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dhp.core.axes import Degrees
from dhp.core.batch import StepData
from dhp.core.parameters import AdapterSettings
from dhp.models import lora as adapters
from tests.engine.test_audio import EXACTLY, Made, made
from tests.engine.test_declared_families import staying_double
from tests.helpers.alike import assert_alike
from tests.helpers.layouts import FIRST_OUT, Case, train
from tests.helpers.rows import slow_but

__all__ = ["made"]  # a fixture
ONE = Degrees()
TEXT = ("text", AdapterSettings(4, 8.0, dropout=0.2))
SOUND = (("audio", AdapterSettings(2, 4.0, targets=("audio_tower",), dropout=0.2)), TEXT)  # convolutions' rows, too
HEARING = [
    Case(ONE, Degrees(tensor=2), 2, audio=Degrees(ulysses=2), lora=SOUND, frozen=("vision",), checkpointing=True),
    Case(ONE, ONE, 1, audio=Degrees(data=2), audio_stages=2, lora=SOUND, frozen=("vision",), packing=True),
]


@pytest.fixture(autouse=True)
def from_the_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `tests.engine.test_adapters`."""
    monkeypatch.setattr(adapters, "FIRST_OUT", FIRST_OUT)


@pytest.mark.parametrize("case", slow_but(HEARING, HEARING[1]), ids=str)
def test_towers_of_sound_are_alike(case: Case, made: Made) -> None:
    with staying_double():
        alone = Case(ONE, ONE, 1, packing=True, audio=ONE, lora=SOUND, frozen=("vision",))
        plain, other = (train(made[0], one, made[1], EXACTLY) for one in (alone, case))
    assert_alike(plain, other)


def test_drawing_by_the_place_in_a_rank_shows(made: Made) -> None:
    """Clips of which each rank takes the first for the same one."""

    def alike(data: StepData) -> StepData:
        of_ranks = lambda row: tuple(replace(one, draws=tuple((1, n, 1) for n in range(len(one.draws)))) for one in row)
        return replace(data, work={**data.work, "audio": tuple(map(of_ranks, data.work["audio"]))})

    case = Case(ONE, ONE, 1, packing=True, audio=ONE, lora=SOUND, frozen=("vision",))
    fault = replace(EXACTLY, edit=alike)
    with staying_double():
        plain, other = train(made[0], case, made[1], EXACTLY), train(made[0], case, made[1], fault)
    with pytest.raises(AssertionError):
        assert_alike(plain, other)
