"""Deal a step's samples out to the ranks of both parts: joins data, models and parallel, without Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dhp.config.schema import DatasetEntry
from dhp.data.preprocess import Preprocessor, Videos
from dhp.data.reading import Reading
from dhp.data.sample import Sample
from dhp.data.sampler import BatchLayout
from dhp.data.source import BatchSource, StepSamples, open_dataset
from dhp.data.video import Taking
from dhp.errors import ModelError
from dhp.messages import StepData, StepInfo, TextInput, VisionInput
from dhp.models.family import Family, ImageLayout
from dhp.models.registry import load_family, load_image_processor, load_tokenizer
from dhp.parallel.dispatch import ImageWork, Piece, Pieces, shard_images
from dhp.rows import Row, Rows, pixels_by_argument


@dataclass(frozen=True)
class FeedSettings:
    """What the dataset actor is told at birth. registry: (annotation_path, data_path) by dataset name.

    replicas × ranks: vision data replicas, and the ranks of each that share a sequence.
    """

    model_name: str
    datasets: tuple[str, ...]
    registry: Mapping[str, DatasetEntry]
    layout: BatchLayout
    replicas: int
    ranks: int
    min_pixels: int | None
    max_pixels: int | None
    seed: int
    shuffle: bool
    on_bad_sample: str
    num_workers: int
    packing: bool
    reading: Reading = Reading()


def make_feed(settings: FeedSettings) -> Feed:
    """Open the datasets and the model's tokenizer and image processor.

    Raises DataError for an annotation file that cannot be read, ModelError for a model without the needed parts.
    """
    family = load_family(settings.model_name)
    tokenizer = load_tokenizer(settings.model_name)
    _check_vocabulary(settings.model_name, tokenizer, family)
    preprocess = Preprocessor(
        tokenizer,
        load_image_processor(settings.model_name),
        family.image_token_id,
        family.image_tokens,
        family.patches,
        settings.min_pixels,
        settings.max_pixels,
        _videos(family, settings.reading),
        settings.reading.max_tokens,
    )
    allow_http = settings.reading.allow_http
    source = BatchSource(
        open_dataset(settings.datasets, settings.registry, settings.seed, settings.shuffle, allow_http),
        preprocess,
        settings.layout,
        settings.seed,
        settings.shuffle,
        settings.on_bad_sample,
        settings.num_workers,
    )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return Feed(source, family, pad or 0, settings.replicas, settings.ranks, settings.packing)


def _videos(family: Family, reading: Reading) -> Videos | None:
    """How the model sees videos; None: not at all."""
    if family.video_token_id is None:
        return None
    taking = Taking(reading.video_fps, reading.video_max_frames, family.frames_per_patch)
    return Videos(family.video_token_id, taking, family.video_patches, reading.video_max_pixels)


def _check_vocabulary(model_name: str, tokenizer: Any, family: Family) -> None:
    """A vocabulary split over tensor ranks finds an id beyond its end on no rank: a zero embedding, a wrong loss."""
    largest, rows = max(tokenizer.get_vocab().values()), family.config.get_text_config().vocab_size
    if largest >= rows:
        raise ModelError(
            f"{model_name}: the tokenizer gives ids up to {largest}, but the model's vocabulary has {rows} rows, so "
            f"largest id({largest}) < rows({rows}) fails. Use the tokenizer that was saved with the model, or enlarge "
            "the model with resize_token_embeddings() and save it again."
        )


@dataclass(frozen=True)
class Picture:
    """An image or video: the text replica that needs it, its patches in processor order, its layout."""

    replica: int
    pixels: Tensor  # [patches, values]
    layout: ImageLayout


class Feed:
    """Steps as the ranks receive them. `step(k)` depends on k alone."""

    def __init__(
        self, source: BatchSource, family: Family, pad_token_id: int, replicas: int, ranks: int, packing: bool = False
    ):
        """replicas × ranks: vision data replicas, and the ranks of each that share a sequence.
        packing: one row without padding for each text replica and micro-batch, in place of a row a sample.
        """
        self._source = source
        self._family = family
        self._rows = Rows(family, pad_token_id, packing)
        self._replicas, self._ranks = replicas, ranks
        self._layout = lru_cache(maxsize=1024)(family.image_layout)

    @property
    def dataset_size(self) -> int:
        """Samples of all datasets together."""
        return self._source.dataset_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps that show each sample once."""
        return self._source.steps_per_epoch

    def step(self, step: int) -> StepData:
        """Read, decode and deal out one step (0-based). Raises DataError as data.on_bad_sample says."""
        start = time.perf_counter()
        samples = self._source.step(step)
        info = _count(samples)
        pictures = [self._pictures(rows) for rows in samples.samples]
        seen = [m for m, found in enumerate(pictures) if found]
        vision, text = [], []
        for m, rows in enumerate(samples.samples):
            shards = self._shard(pictures[m])
            last = bool(seen) and m == seen[-1]
            ranks, replicas = range(len(shards)), enumerate(rows)
            vision.append(tuple(self._vision(pictures[m], shards, rank, len(rows), last) for rank in ranks))
            text.append(tuple(self._text(row, d, pictures[m], shards, info.target_tokens) for d, row in replicas))
        places = sum(work.tensors["input_ids"].numel() for row in text for work in row)
        info = replace(info, places=places, data_s=time.perf_counter() - start)
        return StepData(info, tuple(vision), tuple(text))

    def samples(self, step: int) -> StepSamples:
        """The samples of a step (0-based), before they are dealt out."""
        return self._source.step(step)

    def model_inputs(self, step: int) -> dict[str, Tensor]:
        """The step's tensors by `<text data replica>/<micro-batch>/<model argument>`, for a plain model.

        A row a sample, right-padded, also where training packs them: plain transformers would let the samples of a
        packed row see each other, and what a packed row must equal is each of its samples alone.
        """
        tensors = {}
        for m, rows in enumerate(self._source.step(step).samples):
            for d, row in enumerate(rows):
                named = self._rows.padded(row) | pixels_by_argument(row)
                plain = self._family.plain_inputs(named)
                tensors |= {f"{d}/{m}/{name}": tensor.contiguous() for name, tensor in plain.items()}
        return tensors

    def _pictures(self, rows: Sequence[Row]) -> list[Picture]:
        return [
            Picture(d, torch.from_numpy(pixels), self._layout(grid))
            for d, row in enumerate(rows)
            for sample in row
            for pixels, grid in zip(sample.pixels, sample.grids, strict=True)
        ]

    def _shard(self, pictures: Sequence[Picture]) -> list[Pieces]:
        """Pieces for each vision rank, sequence ranks innermost."""
        work = [ImageWork(p.replica, p.layout.window_lengths, p.layout.frame_lengths) for p in pictures]
        sharded = shard_images(work, self._replicas, self._ranks, self._family.vision_knee)
        return [pieces for replica in sharded for pieces in replica]

    def _vision(
        self, pictures: Sequence[Picture], shards: Sequence[Pieces], rank: int, text_replicas: int, last: bool
    ) -> VisionInput:
        unit, dummy = self._family.merge_unit, self._family.dummy_patches
        first = rank - rank % self._ranks
        group = shards[first : first + self._ranks]
        cuts = [_cut(pictures[piece.image], piece.first, piece.last) for piece in shards[rank]]
        rows = [0] * text_replicas
        for piece, cut in zip(shards[rank], cuts, strict=True):
            rows[pictures[piece.image].replica] += len(cut.pixels) // unit
        if not cuts:
            cuts = [_Cut(torch.zeros(dummy, self._family.patch_dim), torch.zeros(dummy, 2, dtype=torch.long), (dummy,))]
        segment_lengths, shards = _lay_out(pictures, group, dummy)
        return VisionInput(
            active=bool(pictures),
            last=last,
            pixels=torch.cat([cut.pixels for cut in cuts]),
            positions=torch.cat([cut.positions for cut in cuts]),
            window_lengths=tuple(length for cut in cuts for length in cut.window_lengths),
            segment_lengths=segment_lengths,
            shards=shards,
            rows=tuple(rows),
        )

    def _text(
        self, row: Row, replica: int, pictures: Sequence[Picture], shards: Sequence[Pieces], target_tokens: int
    ) -> TextInput:
        starts, total = {}, 0
        for index, picture in enumerate(pictures):
            if picture.replica == replica:
                starts[index], total = total, total + len(picture.layout.order)
        wanted = [[piece for piece in pieces if piece.image in starts] for pieces in shards]
        units = [[_units(pictures[p.image].layout, p.first, p.last) + starts[p.image] for p in ps] for ps in wanted]
        received = [torch.cat(rank) if rank else torch.empty(0, dtype=torch.long) for rank in units]
        placement = torch.argsort(torch.cat(received)) if total else None
        tensors, lengths = self._rows.make(row)
        return TextInput(tensors, lengths, placement, tuple(map(len, received)), target_tokens)

@dataclass(frozen=True)
class _Cut:
    pixels: Tensor
    positions: Tensor
    window_lengths: tuple[int, ...]


def _cut(picture: Picture, first: int, last: int) -> _Cut:
    layout = picture.layout
    lengths = layout.window_lengths
    begin, end = sum(lengths[:first]), sum(lengths[:last])
    return _Cut(picture.pixels[layout.patch_order()[begin:end]], layout.positions[begin:end], lengths[first:last])


def _units(layout: ImageLayout, first: int, last: int) -> Tensor:
    """Merged tokens of windows `first` to `last`, as indices in processor order."""
    begin, end = (sum(layout.window_lengths[:w]) // layout.unit for w in (first, last))
    return layout.order[begin:end]


def _lay_out(
    pictures: Sequence[Picture], group: Sequence[Pieces], dummy: int
) -> tuple[tuple[int, ...], tuple[tuple[tuple[int, int, int], ...], ...]]:
    """Lengths of the full-attention segments of a group of ranks, and each rank's spans of them.

    A rank without pieces has a dummy window, which is a segment of its own.
    """
    numbers: dict[tuple[int, int], int] = {}  # of a segment by image and place in it
    lengths: list[int] = []
    shards = []
    for pieces in group:
        spans = []
        for piece in pieces:
            for frame, first, count in _frames(pictures[piece.image].layout, piece):
                number = numbers.setdefault((piece.image, frame), len(lengths))
                if number == len(lengths):
                    lengths.append(pictures[piece.image].layout.frame_lengths[frame])
                spans.append((number, first, count))
        if not pieces:
            spans.append((len(lengths), 0, dummy))
            lengths.append(dummy)
        shards.append(tuple(spans))
    return tuple(lengths), tuple(shards)


def _frames(layout: ImageLayout, piece: Piece) -> Iterator[tuple[int, int, int]]:
    """The frames that a piece touches, with its first patch in each and the number of its patches there."""
    begin, end = (sum(layout.window_lengths[:w]) for w in (piece.first, piece.last))
    start = 0
    for frame, length in enumerate(layout.frame_lengths):
        first, last = max(begin - start, 0), min(end - start, length)
        if first < last:
            yield frame, first, last - first
        start += length


def _count(samples: StepSamples) -> StepInfo:
    flat: list[Sample] = [s for rows in samples.samples for row in rows for s in row]
    return StepInfo(
        step=samples.step,
        epoch=samples.epoch,
        samples=len(flat),
        images=sum(len(s.pixels) for s in flat),
        tokens=sum(len(s.input_ids) for s in flat),
        target_tokens=sum(s.target_tokens for s in flat),
        vision_tokens=sum(len(p) for s in flat for p in s.pixels),
        skipped=samples.skipped,
        places=0,
        data_s=0.0,
    )
