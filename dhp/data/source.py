"""The training data as a function of the step number: read, decode and deal out one global batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np

from dhp.config.mixing import split_share
from dhp.config.nearest import did_you_mean, nearest
from dhp.config.schema import DatasetEntry
from dhp.data.annotations import Annotations, read_annotations
from dhp.data.mixture import Portion
from dhp.data.records import Record
from dhp.data.sample import Sample
from dhp.data.sampler import BatchLayout, epoch_of, slots, step_indices, steps_per_epoch
from dhp.errors import ConfigError, DataError


class Dataset:
    """Several datasets, one after another, addressed by one 0-based index."""

    def __init__(self, portions: Sequence[Portion]) -> None:
        if not portions:
            raise DataError("no dataset to train on. Name at least one in data.datasets")
        self._portions = tuple(portions)
        self._ends = np.array(list(accumulate(map(len, portions))))

    def __len__(self) -> int:
        """Samples of one epoch."""
        return int(self._ends[-1])

    def record(self, index: int, epoch: int = 0) -> Record:
        """Parse one annotation. DataError, with its place, if it is defective."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        portion = self._portions[number]
        return portion.record(index - int(self._ends[number]) + len(portion), epoch)


def open_dataset(
    names: Sequence[str],
    registry: Mapping[str, DatasetEntry],
    seed: int = 0,
    shuffle: bool = True,
    allow_http: bool = False,
) -> Dataset:
    """Open the named datasets (`name` or `name%50`), in that order; a name given twice counts twice.

    seed, shuffle: which samples a share and a weight show. DataError for a name that the registry does not hold and for
    a file that cannot be read, ConfigError for a share that is none.
    """
    split = [split_share(name) for name in names]
    opened = {name: _read(name, registry, allow_http) for name in dict(split)}
    return Dataset([Portion(opened[name], share, registry[name].weight, seed, shuffle) for name, share in split])


def _read(name: str, registry: Mapping[str, DatasetEntry], allow_http: bool) -> Annotations:
    if name not in registry:
        suggestion = did_you_mean([nearest(name, registry)]) or ". Add it there"
        raise DataError(f"dataset {name!r} is not in data.data_registry (it holds {sorted(registry)}){suggestion}")
    entry = registry[name]
    data_path = Path(entry.data_path) if entry.data_path else None
    return read_annotations(name, Path(entry.annotation_path), data_path, entry.format, allow_http)


@dataclass(frozen=True)
class StepSamples:
    """The data of one step. step, epoch: 0-based; samples: [micro_batch][replica] -> its samples;
    skipped: one message (dataset, position, reason) for each sample left out."""

    step: int
    epoch: int
    samples: tuple[tuple[tuple[Sample, ...], ...], ...]
    skipped: tuple[str, ...]


class BatchSource:
    """Random access to steps: step(k) depends on k and the arguments here alone, never on earlier calls."""

    def __init__(
        self,
        dataset: Dataset,
        preprocess: Callable[[Record], Sample],
        layout: BatchLayout,
        seed: int,
        shuffle: bool,
        on_bad_sample: str = "error",
        num_workers: int = 0,
    ) -> None:
        """on_bad_sample: "error" raises the first DataError of a step, "skip" leaves the sample's place empty.
        num_workers: threads that decode the samples of a step; 0: the calling thread.
        """
        if on_bad_sample not in ("error", "skip"):
            raise ConfigError(f"data.on_bad_sample = {on_bad_sample!r}; it must be 'error' or 'skip'")
        if num_workers < 0:
            raise ConfigError(f"data.num_workers = {num_workers}; it must be 0 (no threads) or more")
        self._dataset = dataset
        self._preprocess = preprocess
        self._layout = layout
        self._seed = seed
        self._shuffle = shuffle
        self._skip = on_bad_sample == "skip"
        self._num_workers = num_workers

    @property
    def dataset_size(self) -> int:
        """Samples of all datasets together."""
        return len(self._dataset)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that show each sample once."""
        return steps_per_epoch(len(self._dataset), self._layout)

    def step(self, step: int) -> StepSamples:
        """Decode the global batch of one step (0-based). DataError as on_bad_sample says."""
        indices = step_indices(step, len(self._dataset), self._layout, self._seed, self._shuffle)
        epoch = epoch_of(step, len(self._dataset), self._layout)
        outcomes = self._decode(indices, epoch)
        # Slots are dealt before bad samples are left out: a skip must not move any other sample.
        dealt = slots(range(len(indices)), self._layout)
        return StepSamples(
            step=step,
            epoch=epoch,
            samples=tuple(tuple(_usable(outcomes, slot) for slot in row) for row in dealt),
            skipped=tuple(str(outcome) for outcome in outcomes if isinstance(outcome, DataError)),
        )

    def _decode(self, indices: Sequence[int], epoch: int) -> list[Sample | DataError]:
        """One outcome an index, in order, whatever the number of threads."""
        if self._num_workers == 0:
            return [self._prepare(index, epoch) for index in indices]
        # Threads live for one step: nothing to close, and nothing left behind by an error.
        with ThreadPoolExecutor(self._num_workers) as pool:
            return list(pool.map(partial(self._prepare, epoch=epoch), indices))

    def _prepare(self, index: int, epoch: int) -> Sample | DataError:
        try:
            return self._preprocess(self._dataset.record(index, epoch))
        except DataError as error:
            if self._skip:
                return error
            raise


def _usable(outcomes: Sequence[Sample | DataError], slot: Sequence[int]) -> tuple[Sample, ...]:
    return tuple(outcomes[i] for i in slot if isinstance(outcomes[i], Sample))
