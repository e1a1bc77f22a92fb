"""A model trained on short videos and one on long ones, each asked for needles in videos of several lengths."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhp.tiny.made_pictures import NEEDLES, make_needles
from experiments.commands import run_module

TRAINED_ON = {"short": (4, 8), "long": (16, 32, 48, 64), "longest": (1024,)}  # frames of the videos

Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """samples: to train on; steps: of training, None: those of the configuration; frames: of the videos with needles;
    needles: at each length and depth."""

    samples: int
    steps: int | None
    frames: Sequence[int]
    needles: int


def rows(models: Sequence[str], seeds: Sequence[int], size: Size, folder: Path) -> Iterator[Row]:
    """A row for each seed, model and number of frames."""
    for seed in seeds:
        for model in models:
            run_dir = folder / f"{model}-{seed}"
            data = make_needles(folder / f"{model}-data-{seed}", size.samples, TRAINED_ON[model], seed)
            run_module(_training(run_dir, data, seed, size))
            frames = ",".join(map(str, size.frames))
            asked = ["--frames", frames, "--needles", str(size.needles), "--seed", str(seed), "--out", str(run_dir)]
            run_module(["dhp", "evaluate", "needle", str(run_dir), *asked])
            yield from _found(json.loads((run_dir / "needle.json").read_text(encoding="utf-8")), model, seed)


def _training(run_dir: Path, data: Path, seed: int, size: Size) -> list[str]:
    entry = "data.data_registry.needles"
    more = [] if size.steps is None else [f"training.max_steps={size.steps}"]
    place = [f"{entry}.annotation_path={data / NEEDLES}", f"{entry}.data_path={data}"]
    work = [f"data.video_max_frames={max(map(max, TRAINED_ON.values()))}", "cluster.threads_per_actor=1"]
    return ["dhp.train_ray", "--config-name=needle_tiny", f"run_dir={run_dir}", f"seed={seed}", *place, *work, *more]


def _found(table: Row, model: str, seed: int) -> Iterator[Row]:
    """A row for each length: the share of needles that was found, over all depths and at each."""
    for at, frames in enumerate(table["frames"]):
        of_depths = [shares[at] for shares in table["found"]]
        yield {
            "trained_on": model,
            "trained_frames": list(TRAINED_ON[model]),
            "seed": seed,
            "frames": frames,
            "found": round(sum(of_depths) / len(of_depths), 4),
            "depths": table["depths"],
            "by_depth": [round(share, 4) for share in of_depths],
        }
