"""Which sample gets whose images, and that nothing else of it changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dhp.core.errors import DataError
from dhp.data.media.sources import Sound, Video
from dhp.data.read.records import Part, Record, Turn
from dhp.data.sampling.dataset import OTHERS, OWN, Exchanged, partners

A, B, C, D = (Path(f"{name}.png") for name in "abcd")


def record(number: int, *parts: Part) -> Record:
    turns = (Turn("user", (*parts, f"question {number}")), Turn("assistant", (f"answer {number}",)))
    return Record("one", number, f"one: row {number}", turns)


@dataclass
class Listed:
    records: list[Record | None]

    def __len__(self) -> int:
        return len(self.records)

    def record(self, index: int, epoch: int = 0) -> Record:
        found = self.records[index]
        if found is None:
            raise DataError("bad")
        return found


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        ([(1, 7), (1, 8), (1, 9)], {0: 1, 1: 2, 2: 0}),
        ([(1, 7), (1, 7), (1, 8), (1, 7)], {0: 2, 1: 2, 2: 3, 3: 2}),  # never its own once more
        ([(1, 7), (2, 8), (1, 9), (2, 8), (0, 0)], {0: 2, 2: 0}),
        ([(1, 7), None, (1, 8)], {0: 2, 2: 0}),
        ([(1, 7)], {}),
        ([], {}),
    ],
)
def test_each_gets_the_next_others(shown: list[tuple[int, int] | None], wanted: dict[int, int]) -> None:
    assert partners(shown) == wanted


def test_images_change_and_all_else_stays() -> None:
    video, sound = Video(Path("v.mp4")), Sound(Path("s.wav"))
    rows = Listed([record(1, A, video, B), record(2), record(3, sound, C, D), record(4, A)])
    own, others = Exchanged(rows, OWN, skips=False), Exchanged(rows, OTHERS, skips=False)
    assert [own.record(at) for at in range(len(own))] == [rows.records[0], rows.records[2]]
    assert len(others) == 2
    assert others.record(0) == record(1, C, video, D) and others.record(1) == record(3, sound, A, B)


def test_images_of_later_turns_too() -> None:
    first = replace(record(1, A), turns=(*record(1, A).turns, Turn("user", (B, "and?")), Turn("assistant", ("no",))))
    others = Exchanged(Listed([first, record(2, C, D)]), OTHERS, skips=False)
    assert [turn.parts for turn in others.record(0).turns] == [(C, "question 1"), ("answer 1",), (D, "and?"), ("no",)]


def test_bad_samples_and_datasets_without_images() -> None:
    rows = Listed([record(1, A), None, record(3, B)])
    assert len(Exchanged(rows, OWN, skips=True)) == 2
    with pytest.raises(DataError, match="bad"):
        Exchanged(rows, OWN, skips=False)
    with pytest.raises(DataError, match="none of 2 samples shows images that another one could show"):
        Exchanged(Listed([record(1, A), record(2)]), OWN, skips=False)
