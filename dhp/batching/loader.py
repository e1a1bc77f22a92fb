"""Where steps come from: datasets, a sampler, the model's processors and the dealing out, joined without Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dhp.base.degrees import Degrees
from dhp.base.errors import ModelError
from dhp.base.features import FeatureSettings
from dhp.base.messages import StepData
from dhp.base.passes import Passes
from dhp.batching.collate import Collator, pixels_by_argument, sounds_by_argument
from dhp.batching.encoders import AUDIO, VISION, Split
from dhp.batching.scatter import ONE, ONE_GROUP, Dealer
from dhp.config.schema import DatasetEntry
from dhp.data.kept_pictures import KeptPictures
from dhp.data.lengths.cache import LengthCache, Lengths
from dhp.data.lengths.table import MeasuredDataset, RowChunk
from dhp.data.media.video import Taking
from dhp.data.order.balance_settings import BalanceSettings
from dhp.data.order.sampler import RANDOM, BatchLayout, RandomSampler, Sampler, StepBatch
from dhp.data.preprocess import Preprocessor, Prompts, Videos
from dhp.data.read_settings import ReadSettings
from dhp.data.records import Record
from dhp.data.sample import Sample
from dhp.data.sounds import NO_ACTORS, NO_TOWER, Sounds
from dhp.data.source import BatchSource, StepSamples, open_dataset
from dhp.features.folder import FeatureFolder
from dhp.models.family import Family
from dhp.models.positions import find_positions
from dhp.models.registry import load_family, load_image_processor, load_tokenizer
from dhp.parallel.attention.locality import Locality


@dataclass(frozen=True)
class FeedSettings:
    """What the dataset actor is told at birth.

    registry: where each dataset lies, by its name.

    encoders: how each one's inputs are dealt out, by part.

    cache_dir: where lengths are kept. features: where those of pictures are; None: every picture is decoded.

    passes: what a step computes of each part of which not all is trained; none: all is.

    text: degrees of the decoder. sequence_groups: see `dhp.batching.scatter.Dealer`.
    """

    model_name: str
    datasets: tuple[str, ...]
    registry: Mapping[str, DatasetEntry]
    layout: BatchLayout
    encoders: Mapping[str, Split]
    min_pixels: int | None
    max_pixels: int | None
    seed: int
    shuffle: bool
    on_bad_sample: str
    packing: bool
    cache_dir: str
    reading: ReadSettings = ReadSettings()
    balancing: BalanceSettings = BalanceSettings()
    passes: Mapping[str, Passes] = field(default_factory=dict)
    features: FeatureSettings | None = None
    text: Degrees = ONE
    sequence_groups: str = ONE_GROUP


def make_feed(settings: FeedSettings) -> Feed:
    """Open the datasets and the model's tokenizer and image processor. Where rows are balanced, lengths come from the
    cache as far as it has them.

    Raises DataError for an annotation file that cannot be read, ModelError for a model without the needed parts.
    """
    family = load_family(settings.model_name).having(settings.encoders)
    family.processor.load()
    tokenizer = load_tokenizer(settings.model_name, settings.reading.chat_template)
    _check_vocabulary(settings.model_name, tokenizer, family)
    preprocess = Preprocessor(
        tokenizer,
        load_image_processor(settings.model_name),
        family.processor.image_token_id,
        family.processor.image_tokens,
        family.processor.patches,
        settings.min_pixels,
        settings.max_pixels,
        _videos(family, settings.reading),
        settings.reading.max_tokens,
        None if family.processor.placeholder is None else (family.processor.placeholder, family.processor.written),
        family.processor.about(),
        family.processor.image_arguments,
        _sounds(family),
        _prompts(family, settings.reading),
        _kept(family, settings.features),
        find_positions(family.config),
    )
    allow_http = settings.reading.allow_http
    dataset = open_dataset(settings.datasets, settings.registry, settings.seed, settings.shuffle, allow_http)
    measured = None
    if settings.balancing.method != RANDOM:
        cache, whole = LengthCache(Path(settings.cache_dir)), settings.balancing.window is None
        measured = MeasuredDataset(dataset, preprocess, cache, whole)
    sampler = _sampler(settings, measured or dataset)
    source = BatchSource(dataset, preprocess, sampler, settings.on_bad_sample)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    split = settings.encoders[VISION]
    others = {name: other for name, other in settings.encoders.items() if name != VISION}
    shape = (split.replicas, split.ranks, settings.packing)
    dtype: torch.dtype = getattr(torch, split.dtype)
    decoder = (settings.text, settings.sequence_groups)
    return Feed(source, family, pad or 0, *shape, measured, dtype, split.locality, others, settings.passes, *decoder)


def _sampler(settings: FeedSettings, dataset: Any) -> Sampler:
    if settings.balancing.method == RANDOM:
        return RandomSampler(len(dataset), settings.layout, settings.seed, settings.shuffle)
    from dhp.data.order.balanced_sampler import (
        BalancedSampler,  # brings a compiler along, which random batches do without
    )

    return BalancedSampler(dataset, settings.balancing, settings.layout, settings.seed, settings.on_bad_sample)


def _videos(family: Family, reading: ReadSettings) -> Videos | None:
    """How the model sees videos; None: not at all."""
    own = family.processor
    if own.video_token_id is None:
        return None
    taking = Taking(reading.video_fps, reading.video_max_frames, own.frames_per_patch, own.takes_both_ends)
    most = reading.video_max_pixels
    return Videos(own.video_token_id, taking, own.video_patches, most, own.step_tokens, own.step_text)


def _sounds(family: Family) -> Sounds | None:
    """How the run hears; None: not at all."""
    own = family.processor.hearing
    if own is None or AUDIO not in family.parts:
        return None
    own.load()
    return Sounds(own.token_id, own.rate, own.shortest, own.features, own.forms, own.about())


def _kept(family: Family, features: FeatureSettings | None) -> KeptPictures | None:
    """Pictures whose features are on disk; None: none are looked for."""
    own = family.processor
    about = [type(own).__name__, *own.about()]
    if features is None:
        return None
    return KeptPictures(features.tower, FeatureFolder(Path(features.folder)).load, family.tower.tensors, about)


def _prompts(family: Family, reading: ReadSettings) -> Prompts:
    deaf = NO_TOWER if family.processor.hearing is None else NO_ACTORS
    return Prompts(reading.system_prompt, reading.learn_empty_thoughts, deaf)


def _check_vocabulary(model_name: str, tokenizer: Any, family: Family) -> None:
    """A vocabulary split over tensor ranks finds an id beyond its end on no rank: a zero embedding, a wrong loss."""
    largest, rows = max(tokenizer.get_vocab().values()), family.config.get_text_config().vocab_size
    if largest >= rows:
        raise ModelError(
            f"{model_name}: the tokenizer gives ids up to {largest}, but the model's vocabulary has {rows} rows, so "
            f"largest id({largest}) < rows({rows}) fails. Use the tokenizer that was saved with the model, or enlarge "
            "the model with resize_token_embeddings() and save it again."
        )


class Feed:
    """Steps as the ranks receive them. `step(k)` depends on k alone."""

    def __init__(
        self,
        source: BatchSource,
        family: Family,
        pad_token_id: int,
        replicas: int,
        ranks: int,
        packing: bool = False,
        measured: MeasuredDataset | None = None,
        pixel_dtype: torch.dtype = torch.float32,
        locality: Locality | None = None,
        others: Mapping[str, Split] = MappingProxyType({}),
        passes: Mapping[str, Passes] = MappingProxyType({}),
        text: Degrees = ONE,
        sequence_groups: str = ONE_GROUP,
    ):
        """replicas, ranks: vision data replicas, and the ranks of each that share a sequence.

        packing: a text replica has one row without padding in each micro-batch, not a row a sample.

        measured: the dataset's lengths; None: rows are not balanced.

        pixel_dtype: in which patches travel to the tower.

        locality: which vision replicas are near which text replica.

        others: how the inputs of each further encoder are dealt out, by part.

        passes: what a step computes of each part of which not all is trained.

        text: degrees of the decoder; where ranks share a row, there is one without padding, whatever `packing` says.

        sequence_groups: see `dhp.batching.scatter.Dealer`.
        """
        self._source = source
        self._family = family
        self._collator = Collator(family, pad_token_id, packing or text.sequence > 1)
        about = (pixel_dtype, locality, others, passes, text, sequence_groups)
        self._dealer = Dealer(family, self._collator, replicas, ranks, *about)
        self.measured = measured

    @property
    def dataset_size(self) -> int:
        """Samples of all datasets together."""
        return self._source.dataset_size

    @property
    def sampler(self) -> Sampler:
        """The order of the steps."""
        return self._source.sampler

    def steps(self, epochs: int) -> int:
        """Steps of that many epochs."""
        return self._source.sampler.steps(epochs)

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after `step` steps keeps of the data's order; left_out: what was found defective."""
        state = {"step": step, "order": self._source.sampler.order(step)}
        return state if self.measured is None else state | {"left_out": self.measured.left_out()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Before anything is planned. Samples that were left out stay so. Raises DataError unless the steps after those
        of `state` go on where it stopped."""
        if self.measured is not None:
            self.measured.leave_out(state.get("left_out", {}))
        self._source.sampler.load_state_dict(state)

    def batch(self, step: int) -> StepBatch:
        """Which samples a step (0-based) has. Raises DataError for lengths that cannot be told, as data.on_bad_sample
        says."""
        start = time.perf_counter()
        batch = self._source.sampler.batch(step)
        return replace(batch, measure_s=time.perf_counter() - start)

    def read(self, batch: StepBatch) -> StepData:
        """Read, decode and deal out one step. Raises DataError as data.on_bad_sample says."""
        data = self._deal(partial(self._source.read, batch))
        return replace(data, info=replace(data.info, measure_s=batch.measure_s))

    def step(self, step: int) -> StepData:
        """`read` of the `batch` of that number (0-based)."""
        return self._deal(partial(self._source.step, step))

    def sample(self, index: int) -> tuple[Record, Sample]:
        """One sample of the first epoch, by its 0-based index. Raises DataError where it cannot be used."""
        return self._source.sample(index)

    def samples(self, step: int) -> StepSamples:
        """The samples of a step (0-based), before they are dealt out."""
        return self._source.step(step)

    def missing(self, step: int = 0) -> list[RowChunk]:
        """Parts of the datasets whose lengths must be measured before a run begins with `step`."""
        return [] if self.measured is None else self.measured.missing(self._source.sampler.first(step))

    def measure(self, chunk: RowChunk) -> Lengths:
        """Lengths of a part of a dataset; another feed of the same settings may do it for this one."""
        return self.measured.measure(chunk)

    def learn(self, chunk: RowChunk, lengths: Lengths) -> None:
        """Take what was measured."""
        self.measured.learn(chunk, lengths)

    def model_inputs(self, step: int) -> dict[str, Tensor]:
        """The step's tensors by `<text data replica>/<micro-batch>/<model argument>`, for a plain model.

        A row a sample, right-padded, also where training packs them: plain transformers would let the samples of a
        packed row see each other, and what a packed row must equal is each of its samples alone.
        """
        tensors = {}
        for m, rows in enumerate(self._source.step(step).samples):
            for d, row in enumerate(rows):
                named = self._collator.padded(row) | pixels_by_argument(row) | sounds_by_argument(row)
                plain = self._family.processor.plain_inputs(named)
                tensors |= {f"{d}/{m}/{name}": tensor.contiguous() for name, tensor in plain.items()}
        return tensors

    def _deal(self, read: Callable[[], StepSamples]) -> StepData:
        start = time.perf_counter()
        data = self._dealer.deal(read())
        return replace(data, info=replace(data.info, data_s=time.perf_counter() - start))
