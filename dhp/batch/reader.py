"""Reads a step's global batch and shards it over ranks."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from dhp.batch.collate import Collator, Row, pixels_by_argument, sounds_by_argument
from dhp.batch.encoder_shards import AUDIO, ReadPatches, fill, nothing_unread
from dhp.batch.shard import BatchSharder, Division
from dhp.checkpoint.feature_folder import FeatureFolder
from dhp.config.data import DataConfig
from dhp.config.parts import resolved
from dhp.core.batch import FeatureSettings, StepData, VisionInput
from dhp.core.errors import DhpError, ModelError
from dhp.data.media.frames import FrameSampling
from dhp.data.media.sound import AudioPreprocessing
from dhp.data.media.sources import File
from dhp.data.read.records import Record
from dhp.data.remote.places import remote_of
from dhp.data.sample.cached_pictures import CachedPictures
from dhp.data.sample.picture_inputs import ModelMedia
from dhp.data.sample.preprocess import Preprocessor
from dhp.data.sample.sample import LENGTH_COLUMNS, Sample, Videos, tile_arguments
from dhp.data.sample.tokens import NO_ACTORS, NO_TOWER
from dhp.data.sampling.dataset import (
    BatchSource,
    Dataset,
    Exchanged,
    Records,
    StepSamples,
    digest,
    names,
    open_dataset,
    rows_of,
)
from dhp.data.sampling.length_table import LengthCache, Lengths, MeasuredDataset, RowChunk
from dhp.data.sampling.references import ReferenceTable
from dhp.data.sampling.sampler import RANDOM, BalanceSettings, BatchLayout, Sampler, StepBatch
from dhp.data.sampling.step_loads import make_sampler
from dhp.models.config_file import find_positions
from dhp.models.family import Family
from dhp.models.pretrained import load_image_processor, load_tokenizer
from dhp.models.processor_files import find_frame_size
from dhp.models.registry import import_on_rank, load_family
from dhp.objectives.objective import Objective
from dhp.objectives.objectives import find_objective


class BatchReader:
    """Reads steps and shards them over ranks. `step(k)` depends on k alone."""

    def __init__(
        self,
        source: BatchSource,
        family: Family,
        pad_token_id: int,
        division: Division,
        measured: MeasuredDataset | None = None,
        read_patches: ReadPatches = nothing_unread,
        objective: Objective | None = None,
        open_lengths: Callable[[], MeasuredDataset] | None = None,
        dataset: Dataset | None = None,
        references: ReferenceTable | None = None,
    ):
        """measured: the dataset's lengths; None: rows are not balanced.

        read_patches: of long videos, see `dhp.data.sample.picture_inputs.Pictures.read_patches`.

        objective: whose columns and weights the samples get; None: cross-entropy.

        open_lengths: makes `measured` where rows are not balanced, for what a run is expected to take.

        dataset: whose samples the source has, so that those of a step can be named; None: they cannot. references: of
        preferences."""
        self._dataset, self._references = dataset, references
        self._source, self._read_patches = source, read_patches
        self._family = family
        self._collator = Collator(family, pad_token_id, division.packed, objective)
        self._sharder = BatchSharder(family, self._collator, division)
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
        packed row see each other, and what a packed row must equal is each of its samples alone."""
        tensors: dict[str, Tensor] = {}
        for m, rows in enumerate(self._source.step(step).by_side().samples):
            for d, row in enumerate(map(_with_pictures, rows)):
                named = self._collator.padded(row) | pixels_by_argument(row) | sounds_by_argument(row)
                plain = self._family.processor.plain_inputs(named)
                tensors |= {f"{d}/{m}/{name}": tensor.contiguous() for name, tensor in plain.items()}
        return tensors

    def lacks(self) -> list[str]:
        """Datasets of preferences without the reference's log-probabilities."""
        return [] if self._references is None else self._references.missing()

    def keep_references(self, name: str, values: Mapping[int, Sequence[float]]) -> None:
        """Write those of a dataset, by row. Raises ConfigError where that cannot be."""
        assert self._references is not None
        self._references.keep(name, values)

    def _shard(self, read: Callable[[], StepSamples]) -> StepData:
        start = time.perf_counter()
        data = self._sharder.shard(read())
        return replace(data, info=replace(data.info, data_s=time.perf_counter() - start))


def _with_pictures(row: Row) -> Row:
    """Where a second side shows what the first does, it has its pixels too."""
    pairs = zip(row, (None, *row))
    return tuple(
        replace(one, pixels=before.pixels, clips=before.clips) if one.again and before else one for one, before in pairs
    )


def _measured(known: MeasuredDataset, indices: np.ndarray, limit_s: float) -> np.ndarray:
    """Lengths of as many of these samples as are measured in so many seconds, in a random order; one at least."""
    begun, found = time.perf_counter(), []
    for index in np.random.default_rng(0).permutation(indices).tolist():
        found.append(known.columns(np.array([index]), 0))
        if time.perf_counter() - begun > limit_s:
            break
    return np.concatenate(found)


@dataclass(frozen=True)
class BatchReaderSettings:
    """Settings of the dataset actor.

    data: the run's section, resolved; chat_template is the template's text there.

    features: where those of pictures are; None: every picture is decoded.

    exchange: OWN or OTHERS of `dhp.data.sampling.dataset`: samples with images that can be exchanged; "": all, as
    they are.

    objective: the name of what a step minimizes (`dhp.objectives.objectives.find_objective`).

    plugins: modules that register the model's family (`dhp.models.registry`).

    reference: digest of the model that preferences are compared with; "": samples come without its log-probabilities.
    """

    model_name: str
    data: DataConfig
    layout: BatchLayout
    division: Division
    seed: int
    balancing: BalanceSettings = BalanceSettings()
    features: FeatureSettings | None = None
    exchange: str = ""
    objective: str = "sft"
    plugins: tuple[str, ...] = ()
    reference: str = ""


def make_reader(settings: BatchReaderSettings) -> BatchReader:
    """Open the datasets and the model's tokenizer and image processor. Where rows are balanced, lengths come from the
    cache as far as it has them.

    Raises DataError for an annotation file that cannot be read, ModelError for a model without the needed parts."""
    family, tokenizer = open_model(settings)
    preprocess = make_preprocessor(settings, family, tokenizer)
    dataset = open_datasets(settings)
    references = None
    if settings.reference:
        folder = Path(resolved(settings.data.cache_dir)) / "references"
        references = ReferenceTable(folder, settings.reference, dataset.annotations(), preprocess)
        preprocess.references = references
    open_lengths = partial(_open_lengths, settings, dataset, preprocess)
    measured = open_lengths() if settings.balancing.method != RANDOM else None
    records: Records = dataset
    if settings.exchange:
        records = Exchanged(dataset, settings.exchange, settings.data.on_bad_sample == "skip")
    sampler = _sampler(settings, measured or records)
    source = BatchSource(records, preprocess, sampler, settings.data.on_bad_sample, preprocess.pictures.complete)
    return BatchReader(
        source,
        family,
        pad_token(tokenizer),
        settings.division,
        measured,
        preprocess.pictures.read_patches,
        find_objective(settings.objective),
        open_lengths,
        None if settings.exchange else dataset,
        references,
    )


def _open_lengths(settings: BatchReaderSettings, dataset: Dataset, preprocess: Preprocessor) -> MeasuredDataset:
    cache, whole = LengthCache(Path(resolved(settings.data.cache_dir))), settings.balancing.window is None
    return MeasuredDataset(dataset, preprocess, cache, whole)


def open_model(settings: BatchReaderSettings) -> tuple[Family, Any]:
    """The family, ready to read samples, and the tokenizer. Raises ModelError for a model without the needed parts."""
    import_on_rank(settings.plugins)
    family = load_family(settings.model_name).having(settings.division.encoders)
    family.processor.load()
    family.processor.published_positions = settings.data.positions == "published"
    tokenizer = load_tokenizer(settings.model_name, settings.data.chat_template)
    check_vocabulary(settings.model_name, tokenizer, family)
    return family, tokenizer


def make_preprocessor(settings: BatchReaderSettings, family: Family, tokenizer: Any) -> Preprocessor:
    """The preprocessor of records to samples, as the settings say."""
    images, own = load_image_processor(settings.model_name), family.processor
    media = ModelMedia(
        image_processor=images,
        image_token_id=own.image_token_id,
        image_tokens=own.image_tokens,
        patches=own.patches,
        image_arguments={**own.image_arguments, **tile_arguments(images, settings.data.max_tiles)},
        written=None if own.placeholder is None else (own.placeholder, own.written),
        frame_patches=own.frame_patches,
        pictures_apart=own.pictures_apart,
        videos=_videos(family, settings),
        no_videos=own.no_videos,
        sounds=_sounds(family),
        no_audio=NO_TOWER if own.hearing is None else NO_ACTORS,
        positions=find_positions(family.config),
        about=[*own.about(), own.patch_dim],
        kept=_kept(family, settings.features),
    )
    return Preprocessor(tokenizer, media, settings.data)


def open_datasets(settings: BatchReaderSettings) -> Dataset:
    """The datasets of the settings. Raises DataError for an annotation file that cannot be read."""
    data = settings.data
    return open_dataset(
        data.datasets,
        data.data_registry,
        settings.seed,
        data.shuffle,
        data.allow_http,
        remote_of(data),
        find_objective(settings.objective).compares,
    )


def pad_token(tokenizer: Any) -> int:
    """The token that fills rows up."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return pad or 0


def _sampler(settings: BatchReaderSettings, dataset: Any) -> Sampler:
    shuffle, bad = settings.data.shuffle, settings.data.on_bad_sample
    return make_sampler(dataset, settings.balancing, settings.layout, settings.seed, shuffle, bad)


def _videos(family: Family, settings: BatchReaderSettings) -> Videos | None:
    """Video preprocessing; None: the model takes no videos."""
    own, data = family.processor, settings.data
    if own.no_videos:
        return None
    if own.videos is not None:
        return Videos(own.video_token_id, _taking_whole(own.videos, data), own.video_patches, whole=own.videos)
    taking = FrameSampling(data.video_fps, data.video_max_frames, own.frames_per_patch, own.takes_both_ends)
    steps = (own.step_tokens, own.step_text, find_frame_size(settings.model_name, family.config))
    return Videos(own.video_token_id, taking, own.video_patches, data.video_max_pixels, *steps)


_ANY_RATE = 1e9  # frames a second, for a number of frames whatever a video's length


def _taking_whole(own: Any, data: DataConfig) -> FrameSampling:
    """Which frames of a video are taken as pictures: as many as the model's video processor says, where the run sets
    neither number."""
    plain = DataConfig()
    fps, most = data.video_fps, data.video_max_frames
    if (fps, most) == (plain.video_fps, plain.video_max_frames):
        fps = own.fps or (_ANY_RATE if own.most else fps)
        most = own.most or most
    return FrameSampling(fps, most, 1, rule=own.rule, least=1)


def _sounds(family: Family) -> AudioPreprocessing | None:
    """Audio preprocessing; None: the run takes no audio."""
    own = family.processor.hearing
    if own is None or AUDIO not in family.parts:
        return None
    own.load()
    return AudioPreprocessing(own.token_id, own.rate, own.shortest, own.features, own.forms, own.about(), own.longest)


def _kept(family: Family, features: FeatureSettings | None) -> CachedPictures | None:
    """Lookup of cached features; None: every picture is decoded."""
    own = family.processor
    about = [type(own).__name__, *own.about()]
    if features is None:
        return None
    return CachedPictures(features.tower, FeatureFolder(Path(features.folder)).load, family.tower.tensors, about)


def check_vocabulary(model_name: str, tokenizer: Any, family: Family) -> None:
    """A vocabulary split over tensor ranks finds an id beyond its end on no rank: a zero embedding, a wrong loss."""
    largest, rows = max(tokenizer.get_vocab().values()), family.config.get_text_config().vocab_size
    if largest >= rows:
        raise ModelError(
            f"{model_name}: the tokenizer gives ids up to {largest}, but the model's vocabulary has {rows} rows, so "
            f"largest id({largest}) < rows({rows}) fails. Use the tokenizer that was saved with the model, or enlarge "
            "the model with resize_token_embeddings() and save it again."
        )
