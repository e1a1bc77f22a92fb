"""Two-stage sharding, pictures evenly over vision ranks and then tokens evenly over text ranks, beside two ways of one
stage: pictures are shared out evenly and each rank keeps the text beside its own, which is LongVILA's baseline (Chen
et al. 2024, sections 3.2 and 5.1.3), and tokens are, and each rank encodes the pictures whose tokens it has.

Rows have unequal numbers of frames along them. Two ranks, an actor each of both parts, one thread each.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import ray

from dhp.batch.assign_images import ImageWork, Piece, Pieces
from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, StepData
from dhp.data.sample.sample import Sample
from dhp.models.registry import load_family
from dhp.parallel.attention.shard_plan import even_counts
from dhp.step.schedule import make_schedule
from experiments.layouts.ours import UPDATE
from experiments.pair import TEXT, VISION, as_batch, pair_of, settings_of
from experiments.partition.chain import ENGINES
from experiments.small import END, IMAGE, PATCH_VALUES, START, deal, save_even_model, started, timed

RANKS = 2
TWO, BY_TOKEN, BY_PICTURE = "two stages", "one stage, by tokens", "one stage, by pictures"
WIDTHS = {"tower": 128, "decoder": 256, "layers": 4}
SIDE = 8  # patches along a frame's side: 64 patches, 16 tokens
SCENES, FRAMES, WORDS = 6, 12, 300  # of a row: so many times up to so many frames and words
ROWS = 5


def measure(_: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each row, and the median over rows of one-stage seconds to two-stage ones."""
    vision, text = Degrees(ulysses=RANKS), Degrees(ulysses=RANKS)
    ratios: dict[str, list[float]] = {BY_TOKEN: [], BY_PICTURE: []}
    with tempfile.TemporaryDirectory() as folder:
        model = save_even_model(Path(folder), **WIDTHS)
        graph = pair_of(load_family(model), vision, text)
        settings = {part: settings_of(graph, part, model, UPDATE) for part in (VISION, TEXT)}
        schedule = make_schedule("sequential", graph, 1)
        with started(graph, ENGINES, settings) as stages:
            for seed in range(ROWS):
                sample = _row(seed)
                seconds: dict[str, list[float]] = {TWO: [], BY_TOKEN: [], BY_PICTURE: []}
                patches, tokens = {}, {}
                for number in range(given.rounds):
                    for way in list(seconds)[:: 1 if number % 2 else -1]:
                        data = _dealt(model, vision, text, sample, way)
                        patches[way] = [len(work.pixels) for work in data.work[VISION][0]]
                        tokens[way] = [work.tensors["input_ids"].shape[-1] for work in data.work[TEXT][0]]
                        taken, _ = timed(graph, stages, schedule, as_batch(data, ray.put), 1)
                        seconds[way] += taken
                for way, of_rows in ratios.items():
                    of_rows.append(median(one / two for one, two in zip(seconds[way], seconds[TWO], strict=True)))
                yield {
                    "row": seed,
                    "patches": patches,
                    "tokens": tokens,
                    "seconds": {way: round(median(of), 3) for way, of in seconds.items()},
                    "one_to_two": {way: round(of_rows[-1], 3) for way, of_rows in ratios.items()},
                }
    yield {"way": "all rows", "one_to_two": {way: round(median(of_rows), 3) for way, of_rows in ratios.items()}}


def _row(seed: int) -> Sample:
    """Scenes of a random number of frames, each told of in a random number of words, half of which are learned."""
    rng = np.random.default_rng(seed)
    pixels: list[np.ndarray] = []
    ids: list[np.ndarray] = []
    for _ in range(SCENES):
        frames = int(rng.integers(0, FRAMES + 1))
        for _ in range(frames):
            pixels.append(rng.standard_normal((SIDE * SIDE, PATCH_VALUES)).astype(np.float32))
            ids += [np.array([START]), np.full(SIDE * SIDE // 4, IMAGE), np.array([END])]
        ids.append(rng.integers(3, 2000, int(rng.integers(8, WORDS))))
    row = np.concatenate(ids)
    labels = np.where(row < 2000, row, IGNORED)
    kinds = (row == IMAGE).astype(np.int64)
    return Sample("made", seed, row, labels, kinds, tuple(pixels), ((1, SIDE, SIDE),) * len(pixels))


def _dealt(model: str, vision: Degrees, text: Degrees, sample: Sample, way: str) -> StepData:
    if way == TWO:
        return deal(model, vision, text, [sample])
    starts, length = np.flatnonzero(sample.input_ids == START), len(sample.input_ids)
    counts = even_counts(length, RANKS)
    owners = starts * RANKS // length
    if way == BY_PICTURE:
        owners = np.arange(len(starts)) * RANKS // len(starts)
        firsts = [0, *(int(starts[owners == rank][0]) for rank in range(1, RANKS)), length]
        counts = tuple(last - first for first, last in pairwise(firsts))

    def as_owned(images: Sequence[ImageWork], *_: Any, **__: Any) -> list[list[Pieces]]:
        whole = [Piece(number, 0, len(image.window_lengths)) for number, image in enumerate(images)]
        return [[tuple(piece for piece in whole if owners[piece.image] == rank) for rank in range(RANKS)]]

    with (
        mock.patch("dhp.batch.encoder_shards.shard_images", as_owned),
        mock.patch("dhp.batch.row_shards.even_counts", lambda total, parts: counts),
    ):
        return deal(model, vision, text, [sample])
