"""Measures or assumes the samples that a plan is for."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from tqdm import tqdm

from dhp.batch.reader import BatchReader, BatchReaderSettings, make_reader
from dhp.config.parts import model_name
from dhp.config.schema import Config
from dhp.core.errors import DataError, PartFailed
from dhp.data.remote.places import missing_data
from dhp.data.sampling.length_table import Lengths, RowChunk
from dhp.plan.batches import feed_settings

if TYPE_CHECKING:
    from dhp.data.sampling.step_loads import Table

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")


def why_not_measured(config: Config) -> str:
    """Why samples cannot be measured; "": they can."""
    folder = Path(model_name(config))
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return f"the tokenizer of {model_name(config)} is not here"
    if not config.data.datasets:
        return "data.datasets is empty"
    missing = missing_data(config)
    return missing[0].partition(".\n")[0].partition(". Correct")[0] if missing else ""


def measured_table(config: Config, say: Callable[[str], None]) -> Table:
    """Lengths of all samples of the run's datasets, measured as far as data.cache_dir does not have them. Raises
    DataError."""
    say("reading the lengths of samples")
    from dhp.batch.reader import make_reader
    from dhp.data.sampling.step_loads import Table

    settings = measuring_settings(config)
    feed = make_reader(settings)
    chunks = feed.missing()
    if chunks:
        say(f"measuring {sum(len(chunk.rows) for chunk in chunks):,} samples, once: lengths are kept in data.cache_dir")
        measure_all(feed, settings, config.data.num_workers)
    if feed.lengths is None:
        raise DataError(
            "the lengths of samples cannot be measured; give `python -m dhp plan` length= or lengths=FILE.csv"
        )
    return Table(feed.lengths.columns(np.arange(feed.dataset_size), 0))


T = TypeVar("T")


def measuring_settings(config: Config) -> BatchReaderSettings:
    """Settings of a reader that knows the lengths of all samples, of a resolved configuration."""
    settings = feed_settings(config)
    return replace(settings, balancing=replace(settings.balancing, method="balanced", window=None))


_feeds: dict[str, BatchReader] = {}  # of a worker process: the one that it works on


def reader_of_process(settings: BatchReaderSettings) -> BatchReader:
    """The reader of this process, which is made once."""
    if not _feeds:
        _feeds["own"] = make_reader(settings)
    return _feeds["own"]


def _measured(settings: BatchReaderSettings, chunk: RowChunk) -> Lengths:
    return reader_of_process(settings).measure(chunk)


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
