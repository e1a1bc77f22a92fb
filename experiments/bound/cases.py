"""Runs that are bound by one thing each, and the same run with that one thing changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dhp.tiny.made_pictures import make_dataset

LONG_TURNS, LONG_EVERY = 60, 32  # turns of the long sample, one of so many
TALK_TURNS = 15  # of every sample, where the decoder is to have most work


@dataclass(frozen=True)
class Slowed:
    """Functions that take longer, in processes whose log's name begins so: seconds more, and so many times their own
    time more."""

    module: str
    functions: tuple[str, ...]
    processes: str
    seconds: float = 0.0
    times: float = 0.0


@dataclass(frozen=True)
class Case:
    """kind: of the cause that the report is to name; "": it is healthy. bound: overrides of the run; changed: of the
    same run behind the change. slowed: in the first run alone."""

    name: str
    kind: str
    bound: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    slowed: Slowed | None = None


_STEPS = ("forward_step", "backward_step")
_ONE = ("vision.num_actors=1", "vision.parallelism=none", "vision.zero_stage=0")
_ONE_TEXT = ("text.num_actors=1", "text.parallelism=none")
_ANNOTATIONS = "data.data_registry.shapes.annotation_path"
_SMALL = ("data.max_pixels=3136", "data.min_pixels=784")
_LARGE = ("data.min_pixels=200704", "data.max_pixels=200704")  # 448 × 448


def cases(folder: Path) -> list[Case]:
    """All of them. folder: where the data of the long sample are written."""
    long, talks = (with_long_samples(folder, *how) for how in ((LONG_TURNS, LONG_EVERY), (TALK_TURNS, 1)))
    talking = (f"{_ANNOTATIONS}={talks}", "data.max_tokens=4096", *_SMALL)
    return [
        Case("reader", "data", slowed=Slowed("dhp.batch.reader", ("BatchReader.read",), "data", seconds=0.6)),
        Case(
            "rank",
            "slow rank",
            slowed=Slowed(
                "dhp.engine.text_engine", tuple(f"TextEngine.{name}" for name in _STEPS), "text-1", times=1.5
            ),
        ),
        Case("tower", "heavy part", bound=(*_LARGE, *_ONE), changed=_LARGE),
        Case("decoder", "heavy part", bound=(*talking, *_ONE_TEXT), changed=(*talking, "text.parallelism=data")),
        Case("link", "link", slowed=Slowed("dhp.core.collectives", ("CallRecord.note",), "text", seconds=0.006)),
        Case(
            "saves",
            "save",
            bound=(*_ONE, *_ONE_TEXT, "training.save_steps=2", "training.save_in_background=false"),
            changed=(*_ONE, *_ONE_TEXT, "training.save_steps=null"),
        ),
        Case(
            "long sample",
            "long sample",
            bound=(f"{_ANNOTATIONS}={long}", "data.max_tokens=4096"),
            changed=("data.max_tokens=4096",),
        ),
        Case("healthy", "", bound=(*_LARGE, *_ONE, *_ONE_TEXT)),
    ]


def with_long_samples(folder: Path, turns: int, every: int) -> Path:
    """Annotations of the tiny dataset in which one sample in `every` has so many turns; their path."""
    if not (folder / "data").exists():
        make_dataset(folder / "data")
    annotations = json.loads((folder / "data" / "annotations.json").read_text())
    for number in range(0, len(annotations), every):
        first = annotations[number]["conversations"]
        annotations[number]["conversations"] = [*first[:2], *_talk(first) * turns]
    path = folder / "data" / f"{turns}-turns.json"
    path.write_text(json.dumps(annotations))
    return path


def _talk(turns: list[Mapping[str, str]]) -> list[dict[str, str]]:
    text = "Which shapes are there, what are their colours, and how many of each do you see in this picture?"
    return [{"from": "human", "value": text}, {"from": "gpt", "value": turns[1]["value"]}]
