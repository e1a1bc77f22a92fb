"""Lengths of all samples of a run's datasets, measured by several processes where they are not in the cache."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from typing import TypeVar

from tqdm import tqdm

from dhp.batch.build import BatchReaderSettings, make_reader
from dhp.batch.reader import BatchReader
from dhp.config.schema import Config
from dhp.core.errors import PartFailed
from dhp.data.sampling.length_cache import Lengths
from dhp.data.sampling.length_table import RowChunk
from dhp.trainer.batches import feed_settings

T = TypeVar("T")


def measuring_settings(config: Config) -> BatchReaderSettings:
    """Settings of a reader that knows the lengths of all samples, of a resolved configuration."""
    settings = feed_settings(config)
    return replace(settings, balancing=replace(settings.balancing, method="balanced", window=None))


_feeds: dict[str, BatchReader] = {}  # of a worker process: the one that it works on


def own_reader(settings: BatchReaderSettings) -> BatchReader:
    """The reader of this process, which is made once."""
    if not _feeds:
        _feeds["own"] = make_reader(settings)
    return _feeds["own"]


def _measured(settings: BatchReaderSettings, chunk: RowChunk) -> Lengths:
    return own_reader(settings).measure(chunk)


def measure_all(feed: BatchReader, settings: BatchReaderSettings, workers: int) -> None:
    """Measure what the cache does not have, in so many processes; 0: in this one. Raises PartFailed."""
    chunks = feed.missing()
    work = partial(_measured, settings) if workers else feed.measure
    for lengths, chunk in zip(map_chunks(work, chunks, workers, "measuring"), chunks):
        feed.learn(chunk, lengths)


def map_chunks(work: Callable[[RowChunk], T], chunks: Sequence[RowChunk], workers: int, what: str) -> Iterator[T]:
    """The results of `work` for each chunk, in order, from so many worker processes; 0: from this one."""
    bar = {"total": len(chunks), "desc": what, "disable": not chunks}
    if not workers:
        yield from tqdm(map(work, chunks), **bar)
        return
    try:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            yield from tqdm(pool.map(work, chunks), **bar)
    except BrokenProcessPool as error:
        raise PartFailed(
            f"a process died while {what}: killed, perhaps for want of memory, or crashed in a native library. Take "
            "fewer (data.num_workers), or none to see where it happens"
        ) from error
