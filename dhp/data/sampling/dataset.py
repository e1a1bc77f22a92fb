"""Mixes datasets and reads a global batch by step number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Protocol
from zlib import crc32

import numpy as np

from dhp.config.data import DatasetEntry
from dhp.config.parts import split_share
from dhp.core.errors import ConfigError, DataError
from dhp.core.text import did_you_mean, nearest
from dhp.data.media.frames import LongVideo
from dhp.data.media.sources import File, SizedImage, Sound, Video
from dhp.data.read.annotations import Annotations, read_annotations
from dhp.data.read.records import Record, Turn, located
from dhp.data.remote.places import find_place, find_root
from dhp.data.remote.transfer import DEFAULT, RemoteSettings
from dhp.data.sample.sample import Sample, joined_sides
from dhp.data.sampling.sampler import Sampler, StepBatch

OWN, OTHERS = "own", "others"
Shown = tuple[int, int]  # how many images a sample shows, and a number that differs where the images do


class Records(Protocol):
    """Samples by their 0-based indices, as `dhp.data.sampling.dataset.Dataset` has them."""

    def __len__(self) -> int: ...

    def record(self, index: int, epoch: int = 0) -> Record: ...


class Exchanged:
    """Samples with images for which another sample shows as many others: as they are, or each with the images of the
    next such sample. Questions, answers, videos and sounds stay."""

    def __init__(self, records: Records, which: str, skips: bool) -> None:
        """which: OWN or OTHERS; both have the same samples, in the same order. skips: bad samples are left out. Raises
        DataError for a bad sample that is not, and where no sample can be exchanged."""
        self._records = records
        self._pairs = list(partners([_shown(records, index, skips) for index in range(len(records))]).items())
        self._others = which == OTHERS
        if not self._pairs:
            raise DataError(
                f"none of {len(records)} samples shows images that another one could show in their place: as many, and "
                "not the same. Evaluate without exchange=images"
            )

    def __len__(self) -> int:
        return len(self._pairs)

    def record(self, index: int, epoch: int = 0) -> Record:
        """Parse one annotation, and with OTHERS the one whose images it gets. DataError, with its place, if one is
        defective."""
        own, other = self._pairs[index]
        record = self._records.record(own, epoch)
        if not self._others:
            return record
        images = iter(self._records.record(other, epoch).images)
        return replace(record, turns=tuple(_with_images(turn, images) for turn in record.turns))


def partners(shown: Sequence[Shown | None]) -> dict[int, int]:
    """Of each sample that has one, ascending: the next one around that shows as many images and others than it."""
    groups: dict[int, list[int]] = {}
    for index, one in enumerate(shown):
        if one is not None and one[0]:
            groups.setdefault(one[0], []).append(index)
    found: dict[int, int] = {}
    for group in groups.values():
        next_other: int | None = None
        for at in reversed(range(2 * len(group))):  # twice around: the first way only learns what comes after the end
            here, after = group[at % len(group)], group[(at + 1) % len(group)]
            next_other = after if shown[here] != shown[after] else next_other
            if at < len(group) and next_other is not None:
                found[here] = next_other
    return dict(sorted(found.items()))


def _shown(records: Records, index: int, skips: bool) -> Shown | None:
    try:
        images = records.record(index).images
    except DataError:
        if skips:
            return None
        raise
    return len(images), hash(images)


def _with_images(turn: Turn, images: Iterator[File | SizedImage]) -> Turn:
    kept = (str, Video, Sound)
    return replace(turn, parts=tuple(part if isinstance(part, kept) else next(images) for part in turn.parts))


class Portion:
    """A dataset as epochs show it: `record(i, e)` depends on the arguments and the constructor's alone."""

    def __init__(self, annotations: Annotations, share: float, weight: float, seed: int, shuffle: bool) -> None:
        """share: of the samples, 0 < share <= 1, drawn once. weight: how often an epoch shows each of them on average.

        shuffle: which samples come once more, where the weight is not whole, is drawn anew for each cycle through them;
        otherwise they take turns."""
        self.annotations = annotations
        self._seeds = [seed, crc32(annotations.dataset.encode())]
        self._kept = self._draw(share) if share < 1 else None  # int64 [samples], ascending; None: all
        self._samples = len(annotations) if self._kept is None else len(self._kept)
        self._shown = max(1, round(weight * self._samples))
        self._shuffle = shuffle and self._shown != self._samples  # an epoch is shuffled as a whole anyway
        self._order = lru_cache(maxsize=2)(self._cycle_order)

    def __len__(self) -> int:
        """Samples of one epoch."""
        return self._shown

    def record(self, index: int, epoch: int) -> Record:
        """Parse one annotation. index: within the epoch; both 0-based. DataError, with its place, if it is bad."""
        return self.annotations.record(int(self.rows(np.array([index]), epoch)[0]))

    def rows(self, indices: np.ndarray, epoch: int) -> np.ndarray:
        """Rows of the annotations (0-based) that an epoch shows at these indices: int64."""
        # Epochs go round through all samples again and again, so each is shown as often as any other, give or take one.
        cycles, rows = np.divmod(epoch * self._shown + indices, self._samples)
        if self._shuffle:
            for cycle in np.unique(cycles):
                of_cycle = cycles == cycle
                rows[of_cycle] = self._order(int(cycle))[rows[of_cycle]]
        return rows if self._kept is None else self._kept[rows]

    def _draw(self, share: float) -> np.ndarray:
        total = len(self.annotations)
        drawn = np.random.default_rng(self._seeds).permutation(total)[: max(1, round(share * total))]
        return np.sort(drawn)

    def _cycle_order(self, cycle: int) -> np.ndarray:
        return np.random.default_rng([*self._seeds, cycle + 1]).permutation(self._samples)


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
        ((portion, _, inside),) = self.portions(np.array([index]))
        return portion.record(int(inside[0]), epoch)

    def portions(self, indices: np.ndarray) -> Iterator[tuple[Portion, np.ndarray, np.ndarray]]:
        """Each portion that has some of these samples, which of `indices` they are, and their indices in it."""
        numbers = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(numbers):
            portion = self._portions[number]
            of_portion = np.flatnonzero(numbers == number)
            yield portion, of_portion, indices[of_portion] - int(self._ends[number]) + len(portion)

    def first(self, portion: Portion) -> int:
        """The index of a portion's first sample."""
        number = self._portions.index(portion)
        return int(self._ends[number]) - len(portion)

    def annotations(self) -> dict[str, Annotations]:
        """Those of all portions, by the dataset's name."""
        return {portion.annotations.dataset: portion.annotations for portion in self._portions}


def open_dataset(
    names: Sequence[str],
    registry: Mapping[str, DatasetEntry],
    seed: int = 0,
    shuffle: bool = True,
    allow_http: bool = False,
    remote: RemoteSettings = DEFAULT,
    compares: str = "",
) -> Dataset:
    """Open the named datasets (`name` or `name%50`), in that order; a name given twice counts twice.

    seed, shuffle: which samples a share and a weight show. remote: how files behind addresses are read. compares: as
    `dhp.data.read.annotations.Annotations` has it.

    Raises DataError for a name that the registry does not hold and for a file that cannot be read, ConfigError for a
    malformed share."""
    split = [split_share(name) for name in names]
    opened = {name: _read(name, registry, allow_http, remote, compares) for name in dict(split)}
    return Dataset([Portion(opened[name], share, registry[name].weight, seed, shuffle) for name, share in split])


def _read(
    name: str, registry: Mapping[str, DatasetEntry], allow_http: bool, remote: RemoteSettings, compares: str
) -> Annotations:
    if name not in registry:
        suggestion = did_you_mean([nearest(name, registry)]) or ". Add it there"
        raise DataError(f"dataset {name!r} is not in data.data_registry (it holds {sorted(registry)}){suggestion}")
    entry = registry[name]
    with located(f"dataset {name!r}"):
        path, data_path = find_place(entry.annotation_path, remote), find_root(entry.data_path, remote)
    how = (entry.format, allow_http, entry.columns, entry.keep_newlines, compares)
    return read_annotations(name, path, data_path, *how)


@dataclass(frozen=True)
class StepSamples:
    """The data of one step.

    step, epoch: 0-based. samples: [micro_batch][replica] -> its samples. skipped: one message (dataset, position,
    reason) for each sample left out. done: epochs after the step, with a fraction."""

    step: int
    epoch: int
    samples: tuple[tuple[tuple[Sample, ...], ...], ...]
    skipped: tuple[str, ...]
    done: float = 0.0

    @property
    def flat(self) -> list[Sample]:
        """All samples, micro-batch by micro-batch and replica by replica."""
        slots = chain.from_iterable(self.samples)
        return list(chain.from_iterable(slots))

    def by_side(self) -> StepSamples:
        """The same with both sides of each preference in its place."""
        sides = lambda row: tuple(side for sample in row for side in sample.sides or (sample,))
        return replace(self, samples=tuple(tuple(map(sides, rows)) for rows in self.samples))


class BatchSource:
    """Random access to steps: step(k) depends on k and the arguments here alone, never on earlier calls."""

    def __init__(
        self,
        dataset: Records,
        preprocess: Callable[[Record], Sample],
        sampler: Sampler,
        on_bad_sample: str = "error",
        complete: Callable[[Sample], Sample] = lambda sample: sample,
    ) -> None:
        """complete: a sample with the patches that `preprocess` left in the files of long videos.

        on_bad_sample: "error" raises the first DataError of a step, "skip" leaves the sample out."""
        if on_bad_sample not in ("error", "skip"):
            raise ConfigError(f"data.on_bad_sample = {on_bad_sample!r}; it must be 'error' or 'skip'")
        self._dataset = dataset
        self._preprocess, self._complete = preprocess, complete
        self.sampler = sampler
        self._skip = on_bad_sample == "skip"

    @property
    def dataset_size(self) -> int:
        """Samples of all datasets together."""
        return len(self._dataset)

    def sample(self, index: int) -> tuple[Record, Sample]:
        """One sample of the first epoch, by its 0-based index in all datasets. DataError if it cannot be used, whatever
        on_bad_sample says."""
        record = self._dataset.record(index)
        return record, self._complete_one(record)

    def step(self, step: int) -> StepSamples:
        """Decode the global batch of one step (0-based), long videos included. DataError as on_bad_sample says."""
        return self._read(self.sampler.batch(step), self._complete_one)

    def read(self, batch: StepBatch, broken: Mapping[File, str] = MappingProxyType({})) -> StepSamples:
        """Decode the samples of a step, but for long videos. DataError as on_bad_sample says.

        broken: long videos that proved so, and what is wrong with them."""

        def prepare(record: Record) -> Sample:
            sample = self._preprocess(record)
            for one in sample.pixels if broken else ():
                if isinstance(one, LongVideo) and one.file in broken:
                    raise DataError(f"{record.where}: {broken[one.file]}")
            return sample

        return self._read(batch, prepare)

    def _complete_one(self, record: Record) -> Sample:
        sample = self._preprocess(record)
        with located(record.where):
            if sample.sides is None:
                return self._complete(sample)
            return joined_sides(*map(self._complete, sample.sides))

    def _read(self, batch: StepBatch, prepare: Callable[[Record], Sample]) -> StepSamples:
        # Slots were assigned before bad samples are left out: a skip must not move any other sample.
        try_all = lambda slot: [self._try(index, batch.epoch, prepare) for index in slot]
        usable = lambda outcomes: tuple(outcome for outcome in outcomes if isinstance(outcome, Sample))
        outcomes = [list(map(try_all, row)) for row in batch.samples]
        slots = chain.from_iterable(outcomes)
        failed = [str(outcome) for slot in slots for outcome in slot if isinstance(outcome, DataError)]
        return StepSamples(
            step=batch.step,
            epoch=batch.epoch,
            samples=tuple(tuple(map(usable, row)) for row in outcomes),
            skipped=batch.defects + tuple(failed),
            done=batch.done,
        )

    def _try(self, index: int, epoch: int, prepare: Callable[[Record], Sample]) -> Sample | DataError:
        try:
            return prepare(self._dataset.record(index, epoch))
        except DataError as error:
            if self._skip:
                return error
            raise


def rows_of(dataset: Dataset, batch: StepBatch) -> dict[str, np.ndarray]:
    """The rows of a step's samples in their annotations (0-based, ascending, int64), by dataset in order of names."""
    rows: dict[str, list[np.ndarray]] = {}
    for portion, _, found in _rows(dataset, batch):
        rows.setdefault(portion.annotations.dataset, []).append(found)
    return {name: np.sort(np.concatenate(rows[name])).astype("<i8") for name in sorted(rows)}


def digest(rows: Mapping[str, np.ndarray]) -> str:
    """Eight hex digits (CRC-32) of a step's samples, as `rows_of` has them: of each dataset its name and the rows. The
    same wherever they are computed, in whatever order."""
    value = 0
    for name, found in rows.items():
        value = crc32(name.encode() + b"\0", value)
        value = crc32(found.tobytes(), value)
    return f"{value:08x}"


def names(dataset: Dataset, batch: StepBatch) -> tuple[str, ...]:
    """A step's samples, micro-batch by micro-batch: where each is, and the index by which `inspect sample` shows it,
    where the first epoch has it."""
    found: dict[int, str] = {}
    for portion, at, rows in _rows(dataset, batch):
        shown = portion.rows(np.arange(len(portion)), 0)
        before = dataset.first(portion)
        for number, row in zip(at.tolist(), rows.tolist(), strict=True):
            (first,) = np.flatnonzero(shown == row)[:1].tolist() or (None,)
            index = "" if first is None else f"index={before + first}, "
            found[number] = index + portion.annotations.where(row)
    return tuple(found[number] for number in sorted(found))


def _rows(dataset: Dataset, batch: StepBatch) -> Iterator[tuple[Portion, np.ndarray, np.ndarray]]:
    """Each portion that has some of a step's samples, which of them they are, and their rows there."""
    indices = np.array(list(chain.from_iterable(chain.from_iterable(batch.samples))), dtype=np.int64)
    for portion, at, inside in dataset.portions(indices):
        yield portion, at, portion.rows(inside, batch.epoch)
