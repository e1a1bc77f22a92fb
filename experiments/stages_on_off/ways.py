"""Which stages of configs/five_stages_tiny.yaml a run has, and what it is asked at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dhp.tiny.needles import ANNOTATIONS as NEEDLES
from dhp.tiny.needles import make_needles
from dhp.tiny.pictures import ANNOTATIONS, make_dataset

FIRST = ("alignment", "pretraining")  # that all ways share
STAGES = {3: ("short_finetuning",), 4: ("extension_to_8k", "extension_to_16k")}  # by their numbers in LongVILA
LAST = "long_finetuning"
# As table 6 has them.
WAYS = {"all stages": (), "without 3": (3,), "without 4": (4,), "without 3 and 4": (3, 4)}
VIDEOS = {"short": (16, 32), "medium": (48, 64), "long": (96, 128)}  # frames; training has 16 to 64
PICTURES = "pictures"
SEED = 1  # of held-out samples; those of training have seed 0


def kept_stages(way: str) -> list[str]:
    """Of a way, in their order."""
    middle = [name for number, names in STAGES.items() if number not in WAYS[way] for name in names]
    return [*FIRST, *middle, LAST]


def leave_out(names: Sequence[str]) -> list[str]:
    """Overrides for a run without these stages."""
    return [f"~stages.{name}" for name in names]


def lengths(names: Sequence[str], steps: int | None, last: int) -> list[str]:
    """Overrides: so many steps of the last stage, and of the others of these, which have their own by default."""
    own = {name: last if name == LAST else steps for name in names}
    return [f"stages.{name}.settings.training.max_steps={count}" for name, count in own.items() if count is not None]


def first_alone() -> list[str]:
    """Overrides for the stages that all ways share."""
    return leave_out([*(name for names in STAGES.values() for name in names), LAST])


def without(way: str) -> list[str]:
    """Overrides for the stages of a way."""
    return leave_out([name for number in WAYS[way] for name in STAGES[number]])


def hold_out(folder: Path, samples: int) -> list[str]:
    """Make the held-out sets below `folder`; overrides by which the last stage is evaluated on them."""
    pictures = make_dataset(folder / PICTURES, samples, SEED)
    places = {PICTURES: (pictures / ANNOTATIONS, pictures)}
    for name, frames in VIDEOS.items():
        videos = make_needles(folder / name, samples, frames, SEED)
        places[name] = videos / NEEDLES, videos
    entries = [
        f"+data.data_registry.held_out_{name}={{annotation_path: {json.dumps(str(file))}, data_path: "
        f"{json.dumps(str(data))}}}"
        for name, (file, data) in places.items()
    ]
    asked = ", ".join(f"held_out_{name}" for name in places)
    return [*entries, f"+stages.{LAST}.settings.data.eval_datasets=[{asked}]"]
