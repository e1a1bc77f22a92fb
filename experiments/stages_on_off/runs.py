"""Runs of the curriculum through the real entry, with stages left out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhp.observe.metrics import EvalMetrics, read_evaluations, read_record
from experiments.commands import run_module
from experiments.stages_on_off.ways import FIRST, LAST, WAYS, first_alone, hold_out, kept_stages, lengths, without

HELD_OUT = "held_out_"


Row = dict[str, Any]


@dataclass(frozen=True)
class Lengths:
    """steps: of each stage but the last; None: those of the configuration. last: of the last. samples: of each held-out
    set."""

    steps: int | None
    last: int
    samples: int


def rows(ways: Sequence[str], seeds: Sequence[int], given: Lengths, folder: Path) -> Iterator[Row]:
    """A row for each seed and way. The stages that all ways share are trained once for each seed."""
    made = [f"tiny_assets={folder / 'assets'}", "cluster.threads_per_actor=1"]
    asked = hold_out(folder / "held_out", given.samples)
    for seed in seeds:
        shared = folder / f"seed-{seed}"
        train(shared, [*made, f"seed={seed}", *first_alone(), *lengths(FIRST, given.steps, given.last)])
        for way in ways:
            run_dir = folder / "run"
            shutil.copytree(shared, run_dir)
            own = lengths(kept_stages(way), given.steps, given.last)
            train(run_dir, [*made, f"seed={seed}", *without(way), *asked, *own])
            yield row_of(way, seed, run_dir)
            shutil.rmtree(run_dir)


def train(run_dir: Path, overrides: Sequence[str]) -> None:
    """`python -m dhp.train_ray --config-name=five_stages_tiny`; stages that are done in run_dir stay as they are.

    Raises RuntimeError with the end of what a failed run printed.
    """
    run_module(["dhp.train_ray", "--config-name=five_stages_tiny", f"run_dir={run_dir}", *overrides])


def row_of(way: str, seed: int, run_dir: Path) -> Row:
    """What a curriculum left. Raises ValueError where it did not go through the stages of its way."""
    told = json.loads((run_dir / "stages.json").read_text(encoding="utf-8"))
    stages = {name.partition("_")[2]: one["steps"] for name, one in told.items()}
    if list(stages) != kept_stages(way):
        raise ValueError(f"{way} has the stages {', '.join(kept_stages(way))}, but {run_dir} has {', '.join(stages)}")
    last = run_dir / f"{len(stages)}_{LAST}"
    found = {one.dataset.removeprefix(HELD_OUT): one for one in _evaluations(last) if one.dataset}
    return {
        "way": way,
        "stage_3": 3 not in WAYS[way],
        "stage_4": 4 not in WAYS[way],
        "seed": seed,
        "steps": stages,
        "loss": {name: round(_known(one.loss), 4) for name, one in found.items()},
        "accuracy": {name: round(_known(one.accuracy), 4) for name, one in found.items()},
        "samples": {name: one.samples for name, one in found.items()},
    }


def _evaluations(run_dir: Path) -> list[EvalMetrics]:
    return read_evaluations(read_record(run_dir))


def _known(value: float | None) -> float:
    assert value is not None  # of a set with target tokens
    return value
