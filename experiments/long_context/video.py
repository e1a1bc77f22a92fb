"""Long videos: frames that are read and shared out, and rows whose frames are sharded before their tokens."""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import av
import numpy as np
import ray

from dhp.batch.assign_images import ImageWork, Piece, Pieces
from dhp.batch.encoder_shards import Split
from dhp.batch.reader import BatchReader, BatchReaderSettings, make_reader
from dhp.batch.shard import Division
from dhp.config.data import DataConfig, DatasetEntry
from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, StepData, VisionInput
from dhp.data.sample.sample import Sample
from dhp.data.sampling.sampler import BatchLayout
from dhp.models.registry import load_family
from dhp.parallel.attention.shard_plan import even_counts
from dhp.step.schedule import make_schedule
from dhp.tiny.tiny_model import make_tiny_assets
from experiments.layouts.ours import UPDATE
from experiments.pair import TEXT, VISION, as_batch, pair_of, settings_of
from experiments.partition.chain import ENGINES
from experiments.small import END, IMAGE, PATCH_VALUES, START, deal, save_even_model, started, timed

MINUTES, FPS, SIDE = 10, 4, 196  # 2,400 frames
RANKS = (1, 2, 4)
KIB = 1024


def measure(model: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for a video that is decoded whole, and for each number of ranks that own it. MB are 10⁶ bytes."""
    with tempfile.TemporaryDirectory() as name:
        settings = _settings(Path(name), given.minutes)
        whole = _alone(_read, replace(settings, data=replace(settings.data, video_whole_frames=None)))
        yield {"way": "decoded whole", "frames": given.minutes * 60 * FPS} | whole
        for ranks in RANKS:
            own = replace(settings, encoders={VISION: Split(ranks=ranks)})
            reads = _alone(_read, own)
            fills = [_alone(_fill, own, rank) for rank in range(ranks)]
            yield {
                "way": f"{ranks} ranks",
                "reader_mb": reads["peak_mb"],
                "peak_mb": max(fill["peak_mb"] for fill in fills),
                "patches_mb": max(fill["patches_mb"] for fill in fills),
                "seconds": max(fill["seconds"] for fill in fills),
                "peak_to_whole": round(max(fill["peak_mb"] for fill in fills) / whole["peak_mb"], 3),
            }


def _settings(folder: Path, minutes: int) -> BatchReaderSettings:
    make_tiny_assets(folder / "tiny", lambda _: None)
    _write_video(folder / "v.mp4", minutes * 60 * FPS)
    talk = [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "A circle."}]
    (folder / "a.jsonl").write_text(json.dumps({"messages": talk, "videos": ["v.mp4"]}))
    return BatchReaderSettings(
        model_name=str(folder / "tiny" / "model"),
        data=DataConfig(
            ["v"], data_registry={"v": DatasetEntry(str(folder / "a.jsonl"), str(folder))}, shuffle=False,
            max_pixels=SIDE * SIDE, cache_dir=str(folder), video_fps=float(FPS), video_max_frames=1 << 20,
        ),
        layout=BatchLayout(replicas=1, micro_batches=1, micro_batch_size=1),
        division=Division(),
        seed=0,
    )  # fmt: skip


def _write_video(path: Path, frames: int) -> None:
    rng = np.random.default_rng(0)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for _ in range(frames):
            coarse = rng.integers(0, 255, (7, 7, 3), dtype=np.uint8)
            picture = np.kron(coarse, np.ones((SIDE // 7, SIDE // 7, 1), dtype=np.uint8))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def _alone(task: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(task, *given).result()


def _read(settings: BatchReaderSettings) -> dict[str, Any]:
    feed = make_reader(settings)
    return _measured(lambda: _work(feed)[0])


def _fill(settings: BatchReaderSettings, rank: int) -> dict[str, Any]:
    feed = make_reader(settings)
    work = _work(feed)[rank]
    return _measured(lambda: feed.fill(work))


def _work(feed: BatchReader) -> tuple[VisionInput, ...]:
    found: tuple[VisionInput, ...] = feed.read(feed.batch(0)).work[VISION][0]
    return found


def _measured(make: Callable[[], VisionInput]) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, begun = _resident("VmRSS"), time.perf_counter()
    work = make()
    seconds = time.perf_counter() - begun
    mb = lambda count: round(count / 1e6, 1)
    return {
        "peak_mb": mb(_resident("VmHWM") - before),
        "patches_mb": mb(work.pixels.nbytes),
        "seconds": round(seconds, 2),
    }


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return KIB * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


SHARDS = 2
TWO, BY_TOKEN, BY_PICTURE = "two stages", "one stage, by tokens", "one stage, by pictures"
WIDTHS = {"tower": 128, "decoder": 256, "layers": 4}
FRAME_SIDE = 8  # patches along a frame's side: 64 patches, 16 tokens
SCENES, FRAMES, WORDS = 6, 12, 300  # of a row: so many times up to so many frames and words
ROWS = 5


def measure_two_stages(_: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each row, and the median over rows of one-stage seconds to two-stage ones."""
    vision, text = Degrees(ulysses=SHARDS), Degrees(ulysses=SHARDS)
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
                    "row": seed, "patches": patches, "tokens": tokens,
                    "seconds": {way: round(median(of), 3) for way, of in seconds.items()},
                    "one_to_two": {way: round(of_rows[-1], 3) for way, of_rows in ratios.items()},
                }  # fmt: skip
    yield {"way": "all rows", "one_to_two": {way: round(median(of_rows), 3) for way, of_rows in ratios.items()}}


def _row(seed: int) -> Sample:
    """Scenes of a random number of frames, each told of in a random number of words, half of which are learned."""
    rng = np.random.default_rng(seed)
    pixels: list[np.ndarray] = []
    ids: list[np.ndarray] = []
    for _ in range(SCENES):
        frames = int(rng.integers(0, FRAMES + 1))
        for _ in range(frames):
            pixels.append(rng.standard_normal((FRAME_SIDE * FRAME_SIDE, PATCH_VALUES)).astype(np.float32))
            ids += [np.array([START]), np.full(FRAME_SIDE * FRAME_SIDE // 4, IMAGE), np.array([END])]
        ids.append(rng.integers(3, 2000, int(rng.integers(8, WORDS))))
    row = np.concatenate(ids)
    labels = np.where(row < 2000, row, IGNORED)
    kinds = (row == IMAGE).astype(np.int64)
    return Sample("made", seed, row, labels, kinds, tuple(pixels), ((1, FRAME_SIDE, FRAME_SIDE),) * len(pixels))


def _dealt(model: str, vision: Degrees, text: Degrees, sample: Sample, way: str) -> StepData:
    if way == TWO:
        return deal(model, vision, text, [sample])
    starts, length = np.flatnonzero(sample.input_ids == START), len(sample.input_ids)
    counts = even_counts(length, SHARDS)
    owners = starts * SHARDS // length
    if way == BY_PICTURE:
        owners = np.arange(len(starts)) * SHARDS // len(starts)
        firsts = [0, *(int(starts[owners == rank][0]) for rank in range(1, SHARDS)), length]
        counts = tuple(last - first for first, last in pairwise(firsts))

    def as_owned(images: Sequence[ImageWork], *_: Any, **__: Any) -> list[list[Pieces]]:
        whole = [Piece(number, 0, len(image.window_lengths)) for number, image in enumerate(images)]
        return [[tuple(piece for piece in whole if owners[piece.image] == rank) for rank in range(SHARDS)]]

    with (
        mock.patch("dhp.batch.encoder_shards.shard_images", as_owned),
        mock.patch("dhp.batch.row_shards.even_counts", lambda total, parts: counts),
    ):
        return deal(model, vision, text, [sample])
