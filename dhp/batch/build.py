"""Builds a reader of steps from datasets, a sampler, the model's processors and a sharder, without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dhp.batch.draws import Draws
from dhp.batch.encoder_shards import AUDIO, Split
from dhp.batch.reader import BatchReader
from dhp.batch.shard import ONE, ONE_GROUP
from dhp.checkpoint.feature_folder import FeatureFolder
from dhp.config.data import DataConfig
from dhp.config.parts import resolved
from dhp.core.axes import Degrees
from dhp.core.batch import FeatureSettings
from dhp.core.errors import ModelError
from dhp.data.media.frames import FrameSampling
from dhp.data.remote.places import remote_of
from dhp.data.sample.audio import NO_ACTORS, NO_TOWER, AudioPreprocessing
from dhp.data.sample.cached_features import CachedPictures
from dhp.data.sample.lengths import tile_arguments
from dhp.data.sample.preprocess import Preprocessor
from dhp.data.sample.tokens import Prompts
from dhp.data.sample.videos import Videos
from dhp.data.sampling.dataset import BatchSource, Dataset, open_dataset
from dhp.data.sampling.exchanged import Exchanged, Records
from dhp.data.sampling.length_cache import LengthCache
from dhp.data.sampling.length_table import MeasuredDataset
from dhp.data.sampling.sampler import RANDOM, BalanceSettings, BatchLayout, Sampler
from dhp.data.sampling.step_loads import make_sampler
from dhp.models.family import Family
from dhp.models.flops import TrainedShare
from dhp.models.frame_size import find_frame_size
from dhp.models.plugins import import_on_rank
from dhp.models.positions import find_positions
from dhp.models.pretrained import load_image_processor, load_tokenizer
from dhp.models.registry import load_family
from dhp.objectives.registry import find_objective


@dataclass(frozen=True)
class BatchReaderSettings:
    """Settings of the dataset actor.

    data: the run's section, resolved; chat_template is the template's text there.

    encoders: how each one's inputs are sharded, by part.

    features: where those of pictures are; None: every picture is decoded.

    passes: what a step computes of each part of which not all is trained; none: all is.

    text: degrees of the decoder. sequence_groups, even_calls: see `dhp.batch.shard.BatchSharder`.

    exchange: OWN or OTHERS of `dhp.data.sampling.exchanged`: samples with images that can be exchanged; "": all, as
    they are.

    objective: the name of what a step minimizes (`dhp.objectives.objective.find_objective`).

    drawing: parts whose adapters have dropout, which draw by `seed`.

    plugins: modules that register the model's family (`dhp.models.plugins`).
    """

    model_name: str
    data: DataConfig
    layout: BatchLayout
    encoders: Mapping[str, Split]
    seed: int
    balancing: BalanceSettings = BalanceSettings()
    passes: Mapping[str, TrainedShare] = field(default_factory=dict)
    features: FeatureSettings | None = None
    text: Degrees = ONE
    sequence_groups: str = ONE_GROUP
    even_calls: bool = False
    exchange: str = ""
    objective: str = "sft"
    drawing: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()


def make_reader(settings: BatchReaderSettings) -> BatchReader:
    """Open the datasets and the model's tokenizer and image processor. Where rows are balanced, lengths come from the
    cache as far as it has them.

    Raises DataError for an annotation file that cannot be read, ModelError for a model without the needed parts.
    """
    family, tokenizer = open_model(settings)
    preprocess = make_preprocessor(settings, family, tokenizer)
    dataset = open_datasets(settings)
    open_lengths = partial(_open_lengths, settings, dataset, preprocess)
    measured = open_lengths() if settings.balancing.method != RANDOM else None
    records: Records = dataset
    if settings.exchange:
        records = Exchanged(dataset, settings.exchange, settings.data.on_bad_sample == "skip")
    sampler = _sampler(settings, measured or records)
    source = BatchSource(records, preprocess, sampler, settings.data.on_bad_sample, preprocess.pictures.complete)
    division = (settings.passes, settings.text, settings.sequence_groups, settings.even_calls)
    shape = (settings.encoders, settings.data.packing, measured, *division)
    return BatchReader(
        source,
        family,
        pad_token(tokenizer),
        *shape,
        preprocess.pictures.read_patches,
        find_objective(settings.objective),
        open_lengths,
        None if settings.exchange else dataset,
        Draws(settings.seed, settings.drawing),
    )


def _open_lengths(settings: BatchReaderSettings, dataset: Dataset, preprocess: Preprocessor) -> MeasuredDataset:
    cache, whole = LengthCache(Path(resolved(settings.data.cache_dir))), settings.balancing.window is None
    return MeasuredDataset(dataset, preprocess, cache, whole)


def open_model(settings: BatchReaderSettings) -> tuple[Family, Any]:
    """The family, ready to read samples, and the tokenizer. Raises ModelError for a model without the needed parts."""
    import_on_rank(settings.plugins)
    family = load_family(settings.model_name).having(settings.encoders)
    family.processor.load()
    family.processor.published_positions = settings.data.positions == "published"
    tokenizer = load_tokenizer(settings.model_name, settings.data.chat_template)
    check_vocabulary(settings.model_name, tokenizer, family)
    return family, tokenizer


def make_preprocessor(settings: BatchReaderSettings, family: Family, tokenizer: Any) -> Preprocessor:
    """The preprocessor of records to samples, as the settings say."""
    images = load_image_processor(settings.model_name)
    return Preprocessor(
        tokenizer,
        images,
        family.processor.image_token_id,
        family.processor.image_tokens,
        family.processor.patches,
        settings.data.min_pixels,
        settings.data.max_pixels,
        _videos(family, settings),
        settings.data.max_tokens,
        None if family.processor.placeholder is None else (family.processor.placeholder, family.processor.written),
        [*family.processor.about(), family.processor.patch_dim],
        {**family.processor.image_arguments, **tile_arguments(images, settings.data.max_tiles)},
        _sounds(family),
        _prompts(family, settings.data),
        _kept(family, settings.features),
        find_positions(family.config),
        settings.data.video_whole_frames,
        family.processor.frame_patches,
        family.processor.pictures_apart,
    )


def open_datasets(settings: BatchReaderSettings) -> Dataset:
    """The datasets of the settings. Raises DataError for an annotation file that cannot be read."""
    data = settings.data
    return open_dataset(
        data.datasets, data.data_registry, settings.seed, data.shuffle, data.allow_http, remote_of(data)
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
    if own.video_token_id is None:
        return None
    taking = FrameSampling(data.video_fps, data.video_max_frames, own.frames_per_patch, own.takes_both_ends)
    steps = (own.step_tokens, own.step_text, find_frame_size(settings.model_name, family.config))
    return Videos(own.video_token_id, taking, own.video_patches, data.video_max_pixels, *steps)


def _sounds(family: Family) -> AudioPreprocessing | None:
    """Audio preprocessing; None: the run takes no audio."""
    own = family.processor.hearing
    if own is None or AUDIO not in family.parts:
        return None
    own.load()
    return AudioPreprocessing(own.token_id, own.rate, own.shortest, own.features, own.forms, own.about())


def _kept(family: Family, features: FeatureSettings | None) -> CachedPictures | None:
    """Lookup of cached features; None: every picture is decoded."""
    own = family.processor
    about = [type(own).__name__, *own.about()]
    if features is None:
        return None
    return CachedPictures(features.tower, FeatureFolder(Path(features.folder)).load, family.tower.tensors, about)


def _prompts(family: Family, data: DataConfig) -> Prompts:
    no_audio = NO_TOWER if family.processor.hearing is None else NO_ACTORS
    return Prompts(data.system_prompt, data.learn_empty_thoughts, no_audio, data.learn_newline)


def check_vocabulary(model_name: str, tokenizer: Any, family: Family) -> None:
    """A vocabulary split over tensor ranks finds an id beyond its end on no rank: a zero embedding, a wrong loss."""
    largest, rows = max(tokenizer.get_vocab().values()), family.config.get_text_config().vocab_size
    if largest >= rows:
        raise ModelError(
            f"{model_name}: the tokenizer gives ids up to {largest}, but the model's vocabulary has {rows} rows, so "
            f"largest id({largest}) < rows({rows}) fails. Use the tokenizer that was saved with the model, or enlarge "
            "the model with resize_token_embeddings() and save it again."
        )
