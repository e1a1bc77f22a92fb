"""Deal a step's samples out to the shards of vision and text: who computes what, and who sends rows to whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dhp.base.geometry import Form, Grid
from dhp.base.messages import StepData, StepInfo, TextInput, VisionInput
from dhp.base.routes import Route
from dhp.batching.collate import Collator, Row
from dhp.data.balance.metrics import dist_ratio
from dhp.data.source import StepSamples
from dhp.models.family import Family, ImageLayout
from dhp.parallel.attention.image_sharding import ImageWork, Piece, Pieces, shard_images
from dhp.parallel.attention.locality import Locality


@dataclass(frozen=True)
class Picture:
    """An image or video: the text replica that needs it, its patches in processor order, its layout."""

    replica: int
    pixels: Tensor  # [patches, values]
    layout: ImageLayout


class Dealer:
    """Samples as the ranks receive them, a pure function of them."""

    def __init__(
        self,
        family: Family,
        collator: Collator,
        replicas: int,
        ranks: int,
        pixel_dtype: torch.dtype = torch.float32,
        locality: Locality | None = None,
    ):
        """replicas, ranks: vision data replicas, and the ranks of each that share a sequence.

        pixel_dtype: in which patches travel. The tower gets the same bits if it rounds them to this format first thing.

        locality: which vision replicas are near which text replica; None: all are equally near.
        """
        self._locality = locality
        self._pixel_dtype = pixel_dtype
        self._family, self._collator = family, collator
        self._replicas, self._ranks = replicas, ranks
        self._known_layout = lru_cache(maxsize=256)(family.tower.image_layout)

    def deal(self, samples: StepSamples) -> StepData:
        """One step for all ranks."""
        pictures = [self._pictures(rows) for rows in samples.samples]
        targets = sum(sample.target_tokens for sample in samples.flat)
        vision, text, routes = [], [], []
        for of_micro_batch, rows in zip(pictures, samples.samples, strict=True):
            shards = self._shard(of_micro_batch)
            vision.append(tuple(self._vision(of_micro_batch, shards, rank) for rank in range(len(shards))))
            text.append(tuple(self._text(row, d, of_micro_batch, shards, targets) for d, row in enumerate(rows)))
            routes.append(_route(of_micro_batch, shards))
        info = _count(samples, targets, vision, text, self._flops(samples, pictures, targets))
        return StepData(info, {"vision": tuple(vision), "text": tuple(text)}, {"vision": tuple(routes)})

    def _flops(self, samples: StepSamples, pictures: Sequence[Sequence[Picture]], targets: int) -> dict[str, int]:
        lengths = [len(sample.input_ids) for sample in samples.flat]
        return {
            "vision": self._family.tower.work.flops(picture.layout for found in pictures for picture in found),
            "text": self._family.decoder.work.flops(lengths, targets),
        }

    def _pictures(self, rows: Sequence[Row]) -> list[Picture]:
        """Of one micro-batch, in the order of its text replicas and their samples."""
        found = []
        for replica, row in enumerate(rows):
            for sample in row:
                pairs = zip(sample.pixels, sample.grids, strict=True)
                found += [Picture(replica, torch.from_numpy(pixels), self._layout(grid)) for pixels, grid in pairs]
        return found

    def _layout(self, grid: Grid | Form) -> ImageLayout:
        """Sizes of images come again; videos seldom have as many frames, and their layouts are large."""
        video = not isinstance(grid, Form) and grid[0] > 1
        return self._family.tower.image_layout(grid) if video else self._known_layout(grid)

    def _shard(self, pictures: Sequence[Picture]) -> list[Pieces]:
        """Pieces for each vision rank, sequence ranks innermost."""
        work = [ImageWork(p.replica, p.layout.window_lengths, p.layout.frame_lengths) for p in pictures]
        crossover = self._family.tower.attention_crossover_patches
        sharded = shard_images(work, self._replicas, self._ranks, crossover, self._locality)
        return [pieces for replica in sharded for pieces in replica]

    def _vision(self, pictures: Sequence[Picture], shards: Sequence[Pieces], rank: int) -> VisionInput:
        tower = self._family.tower
        dummy = tower.dummy_patches
        first = rank - rank % self._ranks
        group = shards[first : first + self._ranks]
        cuts = [_cut(pictures[piece.image], piece.first, piece.last) for piece in shards[rank]]
        rows = Counter[int]()  # by text replica
        for piece, cut in zip(shards[rank], cuts, strict=True):
            rows[pictures[piece.image].replica] += cut.tokens
        if not cuts:
            positions = torch.zeros(dummy, tower.position_columns, dtype=torch.long)
            pixels = torch.full((dummy, tower.patch_dim), 0.5)  # a black picture is padding to some towers
            cuts = [_Cut(pixels, positions, (dummy,), 0, tower.dummy_form)]
        segment_lengths, shards = _lay_out(pictures, group, dummy)
        return VisionInput(
            pixels=torch.cat([cut.pixels for cut in cuts]).to(self._pixel_dtype),
            positions=torch.cat([cut.positions for cut in cuts]),
            window_lengths=tuple(length for cut in cuts for length in cut.window_lengths),
            segment_lengths=segment_lengths,
            shards=shards,
            rows=tuple(rows[replica] for replica in sorted(rows)),
            forms=tuple(cut.form for cut in cuts if cut.form is not None),
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
        tensors, lengths = self._collator.make(row)
        return TextInput(tensors, lengths, placement, target_tokens, tuple(len(sample.input_ids) for sample in row))


def _route(pictures: Sequence[Picture], shards: Sequence[Pieces]) -> Route:
    """Which vision shard has rows for which text replica."""
    pairs = {(rank, pictures[piece.image].replica) for rank, pieces in enumerate(shards) for piece in pieces}
    return Route(tuple(sorted(pairs)))


@dataclass(frozen=True)
class _Cut:
    pixels: Tensor
    positions: Tensor
    window_lengths: tuple[int, ...]
    tokens: int
    form: Form | None


def _cut(picture: Picture, first: int, last: int) -> _Cut:
    layout = picture.layout
    lengths = layout.window_lengths
    begin, end = sum(lengths[:first]), sum(lengths[:last])
    pixels = picture.pixels[layout.patch_order()[begin:end]]
    tokens = sum(layout.window_tokens[first:last])
    return _Cut(pixels, layout.positions[begin:end], lengths[first:last], tokens, layout.form)


def _units(layout: ImageLayout, first: int, last: int) -> Tensor:
    """Merged tokens of windows `first` to `last`, as indices in processor order."""
    begin, end = (sum(layout.window_tokens[:w]) for w in (first, last))
    return layout.order[begin:end]


def _lay_out(
    pictures: Sequence[Picture], group: Sequence[Pieces], dummy: int
) -> tuple[tuple[int, ...], tuple[tuple[tuple[int, int, int], ...], ...]]:
    """Lengths of the full-attention segments of a group of ranks, and each rank's ranges of them.

    A rank without pieces has a dummy window, which is a segment of its own.
    """
    numbers: dict[tuple[int, int], int] = {}  # of a segment by image and frame
    lengths: list[int] = []
    shards = []
    for pieces in group:
        ranges = []
        for piece in pieces:
            for frame, first, count in _frames(pictures[piece.image].layout, piece):
                number = numbers.setdefault((piece.image, frame), len(lengths))
                if number == len(lengths):
                    lengths.append(pictures[piece.image].layout.frame_lengths[frame])
                ranges.append((number, first, count))
        if not pieces:
            ranges.append((len(lengths), 0, dummy))
            lengths.append(dummy)
        shards.append(tuple(ranges))
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


def _count(
    samples: StepSamples,
    targets: int,
    vision: Sequence[Sequence[VisionInput]],
    text: Sequence[Sequence[TextInput]],
    flops: dict[str, int],
) -> StepInfo:
    flat = samples.flat
    tokens = [[work.tensors["input_ids"].numel() for work in row] for row in text]
    patches = [[len(work.pixels) if any(work.rows) else 0 for work in row] for row in vision]
    return StepInfo(
        step=samples.step,
        epoch=samples.epoch,
        done=samples.done,
        samples=len(flat),
        images=sum(len(s.pixels) for s in flat),
        tokens=sum(len(s.input_ids) for s in flat),
        target_tokens=targets,
        vision_tokens=sum(len(p) for s in flat for p in s.pixels),
        skipped=samples.skipped,
        padded_tokens=sum(map(sum, tokens)),
        dist_ratio={"vision": _mean_dist(patches), "text": _mean_dist(tokens)},
        flops=flops,
        data_s=0.0,
        measure_s=0.0,
    )


def _mean_dist(micro_batches: Sequence[Sequence[int]]) -> float:
    """DistRatio over the ranks, mean over micro-batches in which any has work."""
    found = [dist_ratio(np.array(loads)) for loads in micro_batches if any(loads)]
    return sum(found) / len(found) if found else 0.0
