"""Reads a global batch and shards it over ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from dhp.batch.collate import Collator, pixels_by_argument, sounds_by_argument
from dhp.batch.draws import NO_DRAWS, Draws
from dhp.batch.encoder_shards import Split
from dhp.batch.patches import ReadPatches, fill, nothing_unread
from dhp.batch.shard import ONE, ONE_GROUP, ONE_RANK, BatchSharder
from dhp.core.axes import Degrees
from dhp.core.batch import StepData, VisionInput
from dhp.core.errors import DhpError
from dhp.data.media.sources import File
from dhp.data.read.records import Record
from dhp.data.sample.lengths import LENGTH_COLUMNS
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import BatchSource, Dataset, StepSamples
from dhp.data.sampling.length_cache import Lengths
from dhp.data.sampling.length_table import MeasuredDataset, RowChunk
from dhp.data.sampling.sampler import Sampler, StepBatch
from dhp.data.sampling.step_ids import digest, names, rows_of
from dhp.models.family import Family
from dhp.models.flops import TrainedShare
from dhp.objectives.objective import Objective


class BatchReader:
    """Reads steps and shards them over ranks. `step(k)` depends on k alone."""

    def __init__(
        self,
        source: BatchSource,
        family: Family,
        pad_token_id: int,
        encoders: Mapping[str, Split] = ONE_RANK,
        packing: bool = False,
        measured: MeasuredDataset | None = None,
        passes: Mapping[str, TrainedShare] = MappingProxyType({}),
        text: Degrees = ONE,
        sequence_groups: str = ONE_GROUP,
        even_calls: bool = False,
        read_patches: ReadPatches = nothing_unread,
        objective: Objective | None = None,
        open_lengths: Callable[[], MeasuredDataset] | None = None,
        dataset: Dataset | None = None,
        draws: Draws = NO_DRAWS,
    ):
        """encoders: how the inputs of each encoder of the run are divided, by part.

        packing: a text replica has one row without padding in each micro-batch, not a row a sample.

        measured: the dataset's lengths; None: rows are not balanced.

        passes: what a step computes of each part of which not all is trained.

        text: degrees of the decoder; where ranks share a row, there is one without padding, whatever `packing` says.

        sequence_groups, even_calls: see `dhp.batch.shard.BatchSharder`.

        read_patches: of long videos, see `dhp.data.sample.pictures.Pictures.read_patches`.

        objective: whose columns and weights the samples get; None: cross-entropy.

        open_lengths: makes `measured` where rows are not balanced, for what a run is expected to take.

        dataset: whose samples the source has, so that those of a step can be named; None: they cannot.

        draws: see `dhp.batch.shard.BatchSharder`.
        """
        self._dataset = dataset
        self._source, self._read_patches = source, read_patches
        self._family = family
        self._collator = Collator(family, pad_token_id, packing or text.sequence > 1, objective)
        self._sharder = BatchSharder(family, self._collator, encoders, passes, text, sequence_groups, even_calls, draws)
        self.measured, self._open_lengths = measured, open_lengths

    @property
    def dataset_size(self) -> int:
        """Samples of all datasets together."""
        return self._source.dataset_size

    @property
    def sampler(self) -> Sampler:
        """The order of the steps."""
        return self._source.sampler

    @property
    def lengths(self) -> MeasuredDataset:
        """The dataset's lengths, where rows are balanced."""
        assert self.measured is not None
        return self.measured

    def steps(self, epochs: int) -> int:
        """Steps of that many epochs."""
        return self._source.sampler.steps(epochs)

    def state(self, step: int) -> dict[str, Any]:
        """State of the data's order for a checkpoint after `step` steps; left_out: samples that were found
        defective."""
        state = self._source.sampler.state(step)
        return state if self.measured is None else state | {"left_out": self.measured.left_out()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; called before anything is planned. Samples that were left out stay so. Raises DataError
        unless the steps after those of `state` go on where it stopped."""
        if self.measured is not None:
            self.measured.leave_out(state.get("left_out", {}))
        self._source.sampler.load_state_dict(state)

    def batch(self, step: int) -> StepBatch:
        """Which samples a step (0-based) has. Raises DataError for lengths that cannot be measured, as
        data.on_bad_sample says."""
        start = time.perf_counter()
        batch = self._source.sampler.batch(step)
        return replace(batch, measure_s=time.perf_counter() - start)

    def read(self, batch: StepBatch, broken: Mapping[File, str] = MappingProxyType({})) -> StepData:
        """Read, decode and shard one step; patches of long videos are left to `fill`. Raises DataError as
        data.on_bad_sample says, for `broken` ones too: long videos that `fill` found to be so, and what is wrong."""
        data = self._shard(partial(self._source.read, batch, broken))
        rows = {} if self._dataset is None else rows_of(self._dataset, batch)
        ids = {name: tuple(found.tolist()) for name, found in rows.items()}
        own = "" if self._dataset is None else digest(rows)
        return replace(data, info=replace(data.info, measure_s=batch.measure_s, sample_digest=own, rows=ids))

    def sample_names(self, step: int) -> tuple[str, ...]:
        """Of a step's samples (0-based), by which `inspect sample` finds them."""
        return () if self._dataset is None else names(self._dataset, self._source.sampler.batch(step))

    def fill(self, work: VisionInput) -> VisionInput:
        """A shard's work with the patches that `read` left in their files. Raises UnreadableVideo."""
        return fill(work, self._read_patches)

    def step(self, step: int) -> StepData:
        """`read` of the `batch` of that number (0-based)."""
        return self._shard(partial(self._source.step, step))

    def sample(self, index: int) -> tuple[Record, Sample]:
        """One sample of the first epoch, by its 0-based index. Raises DataError where it cannot be used."""
        return self._source.sample(index)

    def samples(self, step: int) -> StepSamples:
        """The samples of a step (0-based), before they are sharded."""
        return self._source.step(step)

    def some_lengths(self, most: int, limit_s: float) -> np.ndarray:
        """LENGTH_COLUMNS of samples of the first epoch that are spread over it: of all, where all are known, else of as
        many as `most`, and as are measured in limit_s seconds."""
        size = self.dataset_size
        try:
            known = self.measured or (self._open_lengths() if self._open_lengths is not None else None)
            if known is None or not size:
                return np.zeros(0, LENGTH_COLUMNS)
            if self.measured is not None and not known.missing(np.arange(size)):
                return known.columns(np.arange(size), 0)
            return _measured(known, np.linspace(0, size - 1, min(most, size)).astype(np.int64), limit_s)
        except DhpError:  # a run that can be read must not end for what is said of it
            return np.zeros(0, LENGTH_COLUMNS)

    def missing(self, step: int = 0) -> list[RowChunk]:
        """Parts of the datasets whose lengths must be measured before a run begins with `step`."""
        return [] if self.measured is None else self.measured.missing(self._source.sampler.first(step))

    def measure(self, chunk: RowChunk) -> Lengths:
        """Lengths of a part of a dataset; another reader with the same settings may measure them for this one."""
        return self.lengths.measure(chunk)

    def learn(self, chunk: RowChunk, lengths: Lengths) -> None:
        """Store measured lengths."""
        self.lengths.learn(chunk, lengths)

    def model_inputs(self, step: int) -> dict[str, Tensor]:
        """The step's tensors by `<text data replica>/<micro-batch>/<model argument>`, for a plain model.

        A row a sample, right-padded, also where training packs them: plain transformers would let the samples of a
        packed row see each other, and what a packed row must equal is each of its samples alone.
        """
        tensors: dict[str, Tensor] = {}
        for m, rows in enumerate(self._source.step(step).samples):
            for d, row in enumerate(rows):
                named = self._collator.padded(row) | pixels_by_argument(row) | sounds_by_argument(row)
                plain = self._family.processor.plain_inputs(named)
                tensors |= {f"{d}/{m}/{name}": tensor.contiguous() for name, tensor in plain.items()}
        return tensors

    def _shard(self, read: Callable[[], StepSamples]) -> StepData:
        start = time.perf_counter()
        data = self._sharder.shard(read())
        return replace(data, info=replace(data.info, data_s=time.perf_counter() - start))


def _measured(known: MeasuredDataset, indices: np.ndarray, limit_s: float) -> np.ndarray:
    """Lengths of as many of these samples as are measured in so many seconds, in a random order; one at least."""
    begun, found = time.perf_counter(), []
    for index in np.random.default_rng(0).permutation(indices).tolist():
        found.append(known.columns(np.array([index]), 0))
        if time.perf_counter() - begun > limit_s:
            break
    return np.concatenate(found)
