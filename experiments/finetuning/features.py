"""A tower that stays as it is, whose features are on disk, beside one that encodes and beside full training."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from dhp.batch.reader import BatchReader
from dhp.checkpoint.feature_folder import FeatureFolder
from dhp.core.axes import Degrees
from dhp.core.batch import Features, KeepSettings, StepData
from dhp.data.sample.picture_inputs import CachedPictures, seen_to_json
from dhp.data.sample.sample import Sample
from dhp.models.empty import digest_tower
from dhp.models.registry import load_family
from experiments.finetuning.frozen import ALL, NOTHING, SIDE, TRAINED, WIDTHS, WORDS
from experiments.finetuning.ways import BACKWARD, FORWARD, OPTIMIZER, Step, Way
from experiments.pair import TEXT, VISION, join_alone
from experiments.recompute.work import feed_of, make_model, make_samples

CACHED = "nothing, cached"
EDGE = 14  # pixels along a patch's side
_PHASES = (FORWARD, BACKWARD, OPTIMIZER)


@dataclass(frozen=True)
class Taken:
    """One way's step. reading: seconds of looking its picture up and dealing it out, which the step's have too."""

    step: Step
    reading: float
    cached: int  # pictures

    @property
    def seconds(self) -> float:
        """Of the process's CPU, all in all."""
        return self.reading + self.step.seconds


def measure(rounds: int, widths: Mapping[str, int] = WIDTHS, side: int = SIDE) -> Iterator[dict[str, Any]]:
    """A row for each way, after one round that does not count, in which features are encoded and kept.

    Raises AssertionError where losses differ, where features are not read, or where the tower runs though they are.
    """
    with tempfile.TemporaryDirectory() as folder, join_alone():
        model = make_model(Path(folder), **widths)
        (sample,) = make_samples(1, side, WORDS)
        kept = KeepSettings(str(Path(folder) / "features"))
        ways = {
            ALL: Way(model, TRAINED[ALL], 1),
            NOTHING: Way(model, TRAINED[NOTHING], 1),
            CACHED: Way(model, TRAINED[NOTHING], 1, kept),
        }
        plain = _feed(model, lambda: [sample])
        feeds = {ALL: plain, NOTHING: plain, CACHED: _feed(model, _reader(model, kept, sample, Path(folder)))}
        # Every other round the other way around: who comes first finds the caches of another.
        orders = [list(ways), list(ways)[::-1]]
        taken = [
            {train: _take(ways[train], feeds[train]) for train in orders[number % 2]} for number in range(rounds + 1)
        ]
        require_same(taken)
        for train in ways:
            yield _row(train, taken[1:])


def require_same(taken: Sequence[Mapping[str, Taken]]) -> None:
    """Raises AssertionError unless first losses are equal, features change no later one, and all but the first round
    read them."""
    if len({one.step.loss for one in taken[0].values()}) > 1:
        raise AssertionError(f"losses before any update differ: {taken[0]}")
    for number, of_round in enumerate(taken):
        if of_round[NOTHING].step.loss != of_round[CACHED].step.loss:
            raise AssertionError(f"round {number}: losses with features from disk and without differ: {of_round}")
        if of_round[CACHED].cached != (number > 0):
            raise AssertionError(f"round {number} read features of {of_round[CACHED].cached} pictures")
        if number and any(of_round[CACHED].step.vision[phase] for phase in (FORWARD, BACKWARD)):
            raise AssertionError(f"round {number}: the tower ran though features were there: {of_round[CACHED]}")


def _take(way: Way, feed: BatchReader) -> Taken:
    begin = time.process_time()
    data: StepData = feed.step(0)
    reading = time.process_time() - begin
    return Taken(way.step(data), reading, data.info.cached_images)


def _feed(model: str, read: Callable[[], Sequence[Sample]]) -> BatchReader:
    return feed_of(model, Degrees(), Degrees(), read, 1)


def _reader(model: str, kept: KeepSettings, sample: Sample, folder: Path) -> Callable[[], list[Sample]]:
    """What gives the sample as readers of the data have it: its picture, a file of noise, looked up by its bytes. That
    picture's pixels are the sample's, without being decoded."""
    family, picture = load_family(model), folder / "picture.png"
    (grid,) = sample.grids
    noise = np.random.default_rng(0).integers(0, 256, (grid[1] * EDGE, grid[2] * EDGE, 3), dtype=np.uint8)
    Image.fromarray(noise).save(picture)
    tower = digest_tower(model, "float32", (VISION, TEXT))
    pictures = CachedPictures(tower, FeatureFolder(Path(kept.folder)).load, family.tower.tensors, [])
    digest = pictures.digest([])

    def read() -> list[Sample]:
        _, features, found = pictures.look_up(picture, digest, family.processor.image_tokens)
        if found is None:
            about = Features(features.key, seen_to_json(grid, None))
            return [replace(sample, features=(about,))]
        return [replace(sample, pixels=(np.zeros((0, 0), np.float32),), grids=(found[0],), features=(features,))]

    return read


def _row(train: str, taken: Sequence[Mapping[str, Taken]]) -> dict[str, Any]:
    own = [of_round[train] for of_round in taken]
    spent = {
        f"{stage}_s": round(median(sum(vars(one.step)[stage][phase] for phase in _PHASES) for one in own), 4)
        for stage in (VISION, TEXT)
    }
    return {
        "train": train,
        "speed_ratio": round(median(of_round[ALL].seconds / of_round[train].seconds for of_round in taken), 3),
        "bound_ratio": round(median(1 / share_left(of_round[ALL], train) for of_round in taken), 3),
        "step_s": round(median(one.seconds for one in own), 4),
        "reading_s": round(median(one.reading for one in own), 4),
        **spent,
        "rounds": len(taken),
    }


def share_left(full: Taken, train: str) -> float:
    """What must remain of a step of full training, as a share of it: without the tower's backward and optimizer where
    the tower is frozen, and without all of the tower where its features are there."""
    spared = {ALL: (), NOTHING: (BACKWARD, OPTIMIZER), CACHED: _PHASES}[train]
    return (full.seconds - sum(full.step.vision[phase] for phase in spared)) / full.seconds
