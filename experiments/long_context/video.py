"""What each process holds of a ten-minute video, when several vision ranks own its frames.

Each role runs in a process of its own: who reads the step, and for each rank who decodes its share. A process's peak is
that of its resident memory, less what it had before the step; bytes are those of the patches that leave it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np

from dhp.batch.build import BatchReaderSettings, make_reader
from dhp.batch.encoder_shards import VISION, Split
from dhp.batch.reader import BatchReader
from dhp.config.data import DataConfig, DatasetEntry
from dhp.core.batch import VisionInput
from dhp.data.sampling.sampler import BatchLayout
from dhp.tiny.assets import make_tiny_assets

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
        encoders={VISION: Split()},
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
    """What a fresh process answers."""
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
    """Bytes, by the kernel's name for them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return KIB * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])
