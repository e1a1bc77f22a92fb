"""The runs of a way, and what their ranks did."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dhp.batch.build import make_reader
from dhp.config.command_line import compose_config
from dhp.observe.ranks import RankLine, read_rank_lines
from dhp.trainer.preflight import prepare
from dhp.trainer.settings import feed_settings
from experiments.commands import ROOT
from experiments.imbalance.inject.sitecustomize import VARIABLE
from experiments.imbalance.spread import (
    IN_FLIGHT,
    MICRO_BATCH,
    REPLICAS,
    activation_mib,
    device_tokens,
    forward_ms,
    moments,
    overrides,
    spreads,
)
from experiments.made_set import ANNOTATIONS, make_dataset, make_model, place, texts, train

CONFIG = Path(__file__).with_name("config.yaml")
INJECT = Path(__file__).parent / "inject"


@dataclass(frozen=True)
class Work:
    """What all runs share. made: overrides that say where model and data lie."""

    folder: Path
    made: Sequence[str]


def make_work(folder: Path, steps: int) -> Work:
    """The samples of so many steps, and the model, below `folder`."""
    data = make_dataset(folder / "data", steps * IN_FLIGHT * MICRO_BATCH * REPLICAS, seed=0)
    return Work(folder, place(make_model(folder, texts(data)), data, ANNOTATIONS))


def measure(way: str, steps: int, work: Work) -> Iterator[dict[str, Any]]:
    """The rows of one way. steps: of a run, the first of which counts for bytes alone."""
    forwards, lines = run(work, overrides(way, steps))
    seconds, kept = forward_ms(forwards)[IN_FLIGHT:], activation_mib(lines)
    tokens = tokens_of(work, overrides(way, steps), steps, seconds.shape[1])[IN_FLIGHT:]
    timed = {"tokens": tokens, "forward_ms": seconds}
    for row in (*spreads(timed | {"activation_mib": kept}), *moments({**timed, "activation_mib": kept})):
        yield {"way": way, "micro_batches": len(seconds), "steps": steps} | row


def run(work: Work, given: Sequence[str]) -> tuple[list[dict[str, Any]], list[RankLine]]:
    """What each rank's forwards took of its core, each rank's in their order, and what ranks.jsonl has of the run."""
    with tempfile.TemporaryDirectory(dir=work.folder) as name:
        forwards = Path(name) / "forwards"
        forwards.mkdir()
        variables = {VARIABLE: str(forwards), "PYTHONPATH": f"{INJECT}:{ROOT}"}
        train(CONFIG, Path(name) / "run", [*work.made, *given], variables)
        texts = [file.read_text(encoding="utf-8") for file in sorted(forwards.iterdir())]
        return [json.loads(line) for text in texts for line in text.splitlines()], read_rank_lines(Path(name) / "run")


def tokens_of(work: Work, given: Sequence[str], steps: int, devices: int) -> np.ndarray:
    """[micro-batches, devices, replicas]: what goes into the stages of each device, padding included; by reading the
    data of a run once more."""
    own = [*work.made, *given, f"run_dir={work.folder / 'read'}"]
    reader = make_reader(feed_settings(prepare(compose_config(CONFIG.stem, str(CONFIG.parent), own))))
    read = [reader.step(step).work for step in range(steps)]
    patches = [[len(of.pixels) for of in shards] for one in read for shards in one["vision"]]
    tokens = [[of.tensors["input_ids"].numel() for of in shards] for one in read for shards in one["text"]]
    return device_tokens(np.array(patches), np.array(tokens), devices)
