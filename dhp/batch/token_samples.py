"""Samples as token ids and patches, of someone's own loop: checked, put into rows and sharded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any

import numpy as np

from dhp.batch.collate import Collator
from dhp.batch.prompts import check_room, find_stops
from dhp.batch.reader import BatchReaderSettings, open_model, pad_token
from dhp.batch.row_shards import NO_DRAWS
from dhp.batch.shard import TEXT, BatchSharder
from dhp.core.batch import IGNORED, VIDEO, Grid, Sampling, StepData
from dhp.core.errors import DataError
from dhp.core.preferences import CHOSEN, REJECTED, Mark
from dhp.data.read.records import located
from dhp.data.sample.sample import Length, Sample, check_length
from dhp.data.sampling.dataset import StepSamples
from dhp.data.sampling.sampler import BatchLayout, slots
from dhp.models.config_file import find_positions
from dhp.objectives.log_probabilities import WEIGHTS
from dhp.objectives.objective import Objective

Picture = tuple[Grid, np.ndarray, float | None]  # and its patches; seconds of a step of a video
IMAGE = 1  # the kind of a token in whose place an image goes
REFERENCE = "reference"  # dpo's column


@dataclass(frozen=True, eq=False)
class TokenSample:
    """Token ids and patches, taken as they are. L: tokens, each picture's placeholders among them.

    targets: which tokens count, bool [L]; None: all but the first, which nothing predicts, and placeholders. columns:
    what the loss is given of each token, [L], by name; it is read at targets.

    pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw, second_per_grid_ts: as the family's processor
    gives them. Of a family whose pictures are no grids, a `dhp.data.sample.sample.Sample` takes this one's place."""

    token_ids: Sequence[int]
    targets: Sequence[bool] | None = None
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    pixel_values: Any = None
    image_grid_thw: Any = None
    pixel_values_videos: Any = None
    video_grid_thw: Any = None
    second_per_grid_ts: Any = None


class TokenBatcher:
    """Makes steps of samples. They are put into rows in their order, as many as training.micro_batch_size says."""

    def __init__(self, settings: BatchReaderSettings, multiple: int):
        """multiple: of which the number of micro-batches is one. Raises ModelError as `open_model` does."""
        self._settings, self._multiple = settings, multiple
        self.family, tokenizer = open_model(settings)
        self._pad, self._positions = pad_token(tokenizer), find_positions(self.family.config)
        self.stops = find_stops(settings.model_name, self.family.config, tokenizer)

    def read(self, samples: Sequence[TokenSample | Sample], names: Sequence[str] = ()) -> list[Sample]:
        """names: of columns that each needs. Raises DataError for what cannot be computed, by sample and place."""
        if not isinstance(samples, Sequence) or not len(samples):
            what = "no sample" if isinstance(samples, Sequence) else f"a {type(samples).__name__}"
            raise DataError(f"{what} is nothing to compute. Give a list of one sample at least")
        return [self._read(number, one, names) for number, one in enumerate(samples)]

    def positions(self, sample: Sample) -> np.ndarray:
        """Those that the model is given of a `read` sample's tokens, [L], or [3, L] of a model that counts in time,
        height and width."""
        made: np.ndarray = Collator(self.family, self._pad, True).positions((sample,)).numpy()
        made = made.reshape(-1, made.shape[-1])
        return made[0] if len(made) == 1 else made

    def make(self, samples: Sequence[Sample], objective: Objective, total: float | None, number: int) -> StepData:
        """One step of `read` samples; of an objective that compares, one behind another are the sides of a preference.
        total: N; None: the sum of their weights. number: of the step, for what is drawn at random."""
        each = 2 if objective.compares else 1
        units = range(0, len(samples), each)
        replicas, size = self._settings.division.text.data, self._settings.layout.micro_batch_size
        count = -(-len(units) // (replicas * size))
        cut = slots(units, BatchLayout(replicas, -(-count // self._multiple) * self._multiple, size))
        rows = tuple(tuple(tuple(one for at in row for one in samples[at : at + each]) for row in of) for of in cut)
        if total is not None and not 0 < total < inf:
            raise DataError(f"normalizer={total} divides the losses: it is a number above 0")
        data = self._sharder(objective).shard(StepSamples(number, 0, rows, ()), total)
        if not data.info.total_weight > 0 or not np.isfinite(data.info.total_weight):
            raise DataError(
                f"the losses of {len(samples)} samples would be divided by {data.info.total_weight:g}, the sum of the "
                "weights of their targets. Give one target at least a weight above 0, or say normalizer=N, above 0"
            )
        text = tuple(tuple(replace(one, objective=objective) for one in of) for of in data.work[TEXT])
        return replace(data, work={**data.work, TEXT: text})

    def prompts(self, samples: Sequence[Sample], sampling: Sampling) -> Iterator[StepData]:
        """Steps of `read` samples, one for each replica. sampling: without stops, they are the model's."""
        sampling = sampling if sampling.stop else replace(sampling, stop=self.stops)
        for one in samples:
            check_room(one, sampling.max_new_tokens, self._positions)
        replicas, sharder = self._settings.division.text.data, self._sharder(None)
        for first in range(0, len(samples), replicas):
            row = tuple(tuple(samples[at : at + 1]) for at in range(first, first + replicas))
            yield sharder.shard_prompts(StepSamples(first // replicas, 0, (row,), ()), sampling)

    def _sharder(self, objective: Objective | None) -> BatchSharder:
        division = self._settings.division
        if objective is None:
            division = replace(division, packing=True, even_calls=False, draws=NO_DRAWS)
        return BatchSharder(self.family, Collator(self.family, self._pad, division.packed, objective), division)

    def _read(self, number: int, given: TokenSample | Sample, names: Sequence[str]) -> Sample:
        where = f"sample {number}"
        sample = given if isinstance(given, Sample) else self._sample(where, given)
        length, targets = len(sample.input_ids), np.flatnonzero(sample.labels != IGNORED)
        for kind, still in ((IMAGE, True), (VIDEO, False)):
            pairs = zip(sample.grids, sample.video_seconds, strict=True)
            grids = [grid for grid, seconds in pairs if (seconds is None) == still]
            wanted = sum(map(self.family.processor.image_tokens, grids))
            _require_tokens(where, int((sample.mm_token_type_ids == kind).sum()), wanted, kind)
        with located(where):
            check_length(Length(int((sample.mm_token_type_ids > 0).sum()), length), None, self._positions)
        columns = {WEIGHTS: np.ones(length)} | {name: _floats(where, name, of) for name, of in sample.columns.items()}
        for name in (*columns, *names):
            if name not in columns:
                raise DataError(f"{where} has no column {name}, which the loss reads. It has {', '.join(columns)}")
            if len(columns[name]) != length:
                raise DataError(f"{where}: its column {name} has {len(columns[name])} values for {length} tokens")
            broken = targets[~np.isfinite(columns[name][targets])]
            if len(broken):
                raise DataError(
                    f"{where}: its column {name} is {columns[name][broken[0]]} at token {broken[0]}, a target. "
                    "A loss of it would break every weight: leave the token out of targets, or mend the number"
                )
        return replace(sample, dataset="tokens", position=number + 1, columns=columns)

    def _sample(self, where: str, given: TokenSample) -> Sample:
        if not isinstance(given, TokenSample):
            raise DataError(f"{where}: it is a {type(given).__name__}. Give TokenSamples, or dhp Samples, in a list")
        processor, ids = self.family.processor, np.asarray(given.token_ids)
        if ids.dtype.kind not in "iu" and ids.size:
            raise DataError(f"{where}: its token_ids are {ids.dtype}. They are whole numbers")
        ids = ids.astype(np.int64)
        rows = self.family.config.get_text_config().vocab_size
        strange = np.flatnonzero((ids < 0) | (ids >= rows))
        if ids.ndim != 1 or not len(ids) or len(strange):
            found = f"{ids[strange[0]]} at {strange[0]}" if ids.ndim == 1 and len(strange) else f"the shape {ids.shape}"
            raise DataError(f"{where}: its token_ids have {found}. They are one row, each from 0 to {rows - 1}")
        kinds = np.where(ids == processor.image_token_id, IMAGE, 0)
        if processor.video_token_id is not None:
            kinds[ids == processor.video_token_id] = VIDEO
        sounds = processor.hearing is not None and int((ids == processor.hearing.token_id).sum())
        if sounds:
            raise DataError(f"{where}: it has {sounds} tokens of sound and no clip. Give a dhp Sample, which has clips")
        pictures = self._pictures(where, kinds, given)
        grids, pixels, times = zip(*pictures, strict=True) if pictures else ((), (), ())
        counts = kinds == 0 if given.targets is None else np.asarray(given.targets, dtype=bool)
        counts = counts & (np.arange(len(ids)) > 0) if given.targets is None else counts
        if counts.shape != ids.shape or counts[0]:
            wrong = f"targets[0] of its {len(ids)} tokens" if counts.shape == ids.shape else f"{len(counts)} targets"
            raise DataError(
                f"{where}: {wrong}: of {len(ids)} tokens all but the first may be targets, true or false each"
            )
        labels = np.where(counts, ids, IGNORED)
        columns = {name: np.asarray(values) for name, values in given.columns.items()}
        return Sample("tokens", 1, ids, labels, kinds, tuple(pixels), tuple(grids), tuple(times), columns=columns)

    def _pictures(self, where: str, kinds: np.ndarray, given: TokenSample) -> list[Picture]:
        """In the order in which their placeholders, tokens of these kinds, follow one another."""
        width = self.family.processor.patch_dim
        images = _cut_apart(where, "image_grid_thw", given.image_grid_thw, given.pixel_values, width)
        videos = _cut_apart(where, "video_grid_thw", given.video_grid_thw, given.pixel_values_videos, width)
        seconds = [1.0] * len(videos) if given.second_per_grid_ts is None else map(float, given.second_per_grid_ts)
        shown: dict[int, list[Picture]] = {
            IMAGE: [(*image, None) for image in images],
            VIDEO: [(*video, second) for video, second in zip(videos, seconds, strict=True)],
        }
        tokens = self.family.processor.image_tokens
        for kind, of_kind in shown.items():
            _require_tokens(where, int((kinds == kind).sum()), sum(tokens(grid) for grid, _, _ in of_kind), kind)
        found, places = list[Picture](), kinds[kinds > 0]
        while len(places):
            picture = shown[kind := int(places[0])].pop(0)
            own, places = np.split(places, [tokens(picture[0])])
            _require_tokens(where, int((own == kind).sum()), len(own), kind)
            found.append(picture)
        return found


def with_marks(samples: Sequence[Sample]) -> list[Sample]:
    """Pairs for dpo, the better one first, each with the reference's log-probability of its targets. Raises DataError
    for an odd number."""
    if len(samples) % 2:
        raise DataError(f"dpo takes pairs, the better answer first, and {len(samples)} samples are no pairs")
    sums = [float(one.columns[REFERENCE][1:][one.labels[1:] != IGNORED].sum()) for one in samples]
    sides = ((CHOSEN, True), (REJECTED, False)) * (len(samples) // 2)
    marks = [Mark(side, total, first) for (side, first), total in zip(sides, sums, strict=True)]
    return [replace(one, mark=mark) for one, mark in zip(samples, marks, strict=True)]


def _floats(where: str, name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: its column {name} is no row of numbers ({error})") from error


def _require_tokens(where: str, tokens: int, wanted: int, kind: int) -> None:
    if tokens != wanted:
        what = "videos" if kind == VIDEO else "images"
        raise DataError(
            f"{where}: its token ids have {tokens} placeholders of {what}, and its patches of {what} become {wanted} "
            "tokens. Give ids and patches of the same call of the processor"
        )


def _cut_apart(where: str, key: str, grids: Any, pixels: Any, width: int) -> list[tuple[Grid, np.ndarray]]:
    """Each picture's grid and its patches, [patches, width]."""
    shape = np.shape(grids) if grids is not None and len(grids) else (0, 3)
    if len(shape) != 2 or shape[1] != 3:
        raise DataError(f"{where}: its {key} has the shape {shape}, and a picture is a row of it: t, height, width")
    every = [tuple(map(int, grid)) for grid in (() if grids is None else grids)]
    patches = np.zeros((0, 0)) if pixels is None else np.asarray(pixels, dtype=np.float32)
    counts = [prod(grid) for grid in every]
    if patches.ndim != 2 or len(patches) != sum(counts) or (counts and patches.shape[1] != width):
        raise DataError(
            f"{where}: its {key} says {sum(counts)} patches of {width} values, and its pixels have the shape "
            f"{patches.shape}. Give both as one call of the processor does; of a family without grids, a dhp Sample"
        )
    if not np.isfinite(patches).all():
        raise DataError(f"{where}: its pixels of {key} have numbers that are none, which would break every weight")
    cuts = np.split(patches, np.cumsum(counts)[:-1]) if counts else []
    return [((t, h, w), cut) for (t, h, w), cut in zip(every, cuts, strict=True)]
