"""Shards an encoder's inputs: pictures and clips over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dhp.batch.assign_images import ImageWork, Locality, Piece, Pieces, shard_images
from dhp.batch.collate import Row
from dhp.batch.row_shards import with_keys
from dhp.core import kinds
from dhp.core.batch import Features, Grid, PictureRows, ProcessorOutput, RowRun, UnreadPatches, VisionInput
from dhp.core.draws import DrawRun
from dhp.core.graph import Route
from dhp.data.media.frames import LongVideo
from dhp.data.sample.sample import Sample
from dhp.models.tower import Tower
from dhp.models.types import ImageLayout


def lay_out(
    layouts: Sequence[ImageLayout], group: Sequence[Pieces], dummy: int
) -> tuple[tuple[int, ...], tuple[tuple[tuple[int, int, int], ...], ...]]:
    """Lengths of the full-attention segments of a group of ranks, and each rank's ranges of them.

    A rank without pieces has a dummy window, which is a segment of its own."""
    numbers: dict[tuple[int, int], int] = {}  # of a segment by image and frame
    lengths: list[int] = []
    shards = []
    for pieces in group:
        ranges = []
        for piece in pieces:
            for frame, first, count in _frames(layouts[piece.image], piece):
                number = numbers.setdefault((piece.image, frame), len(lengths))
                if number == len(lengths):
                    lengths.append(layouts[piece.image].frame_lengths[frame])
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


# Of a long video, some patches: parts of them, each with its places among those asked for.
ReadPatches = Callable[[Any, np.ndarray], Iterator[tuple[np.ndarray, np.ndarray]]]


def fill(work: VisionInput, read: ReadPatches) -> VisionInput:
    """A shard's work with all its pixels, and at most one more part of a video in memory. Raises as `read` does."""
    if not work.unread:
        return work
    pixels: Tensor | None = None
    first = 0
    for piece in work.unread:
        last = first + count_patches(piece)
        for places, patches in _parts(piece, read):
            if pixels is None:
                pixels = work.pixels.new_empty(len(work.pixels), patches.shape[1])
            pixels[first:last][places] = patches.to(pixels.dtype)
        first = last
    assert pixels is not None  # a shard has at least a dummy
    return replace(work, pixels=pixels, unread=())


def nothing_unread(video: Any, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`ReadPatches` for samples that have all their pixels: always raises."""
    raise AssertionError(f"{len(rows)} patches of {video} are unread, though no sample was to be read in parts")


def count_patches(piece: Tensor | UnreadPatches) -> int:
    """How many a piece of a shard's work has."""
    return len(piece) if isinstance(piece, Tensor) else len(piece.rows)


def _parts(piece: Tensor | UnreadPatches, read: ReadPatches) -> Iterable[tuple[Tensor | slice, Tensor]]:
    if isinstance(piece, Tensor):
        return [(slice(None), piece)]
    parts = read(piece.video, piece.rows.numpy())
    return ((torch.from_numpy(places), torch.from_numpy(patches)) for places, patches in parts)


VISION, AUDIO = kinds.VISION.part, kinds.AUDIO.part  # the encoders that samples have inputs for
RowKeys = Sequence[Sequence[int]]  # of each sample of each row
Shown = Iterable[tuple[np.ndarray | LongVideo, Grid | ProcessorOutput, Features | None]]
_SHOWN: Mapping[str, Callable[[Sample], Shown]] = {
    VISION: lambda sample: zip(
        sample.pixels, sample.grids, sample.features or (None,) * len(sample.grids), strict=True
    ),
    AUDIO: lambda sample: zip(sample.clips, sample.clip_forms, (None,) * len(sample.clips), strict=True),
}


_NONE = torch.empty(0, dtype=torch.long)


@dataclass(frozen=True)
class Split:
    """How an encoder's inputs are sharded.

    replicas × ranks: its data replicas, and the ranks of each that share a sequence. dtype: a torch dtype's name, in
    which inputs travel. locality: which replicas are near which replica of the decoder; None: all alike.

    stages: that the encoder is cut into.

    even_calls: every rank calls the tower as often as the one that calls it most, because each call communicates: it
    gathers weights that are sharded over the ranks."""

    replicas: int = 1
    ranks: int = 1
    dtype: str = "float32"
    locality: Locality | None = None
    even_calls: bool = False
    stages: int = 1


@dataclass(frozen=True)
class Picture:
    """An image or video, or a clip: the text replica that needs it, its patches in processor order, its layout.

    place: of its first token among those of all the replica's pictures. features: the key that its features are to be
    cached under; None: they are not. key: of what adapters draw for it."""

    replica: int
    pixels: Tensor | LongVideo  # [patches, values]
    layout: ImageLayout
    place: int = 0
    features: Features | None = None
    key: int = 0


@dataclass(frozen=True)
class CachedPicture:
    """A picture whose features are cached, so that no rank encodes it: [tokens, width] by name. Else as `Picture`."""

    replica: int
    place: int
    rows: Mapping[str, Tensor]

    @property
    def tokens(self) -> int:
        return len(next(iter(self.rows.values())))


@dataclass(frozen=True)
class EncoderShards:
    """A micro-batch of one encoder: its pictures in the order of the text replicas and their samples, and the pieces
    of each rank, sequence ranks innermost; cached: pictures with cached features, which no rank encodes. Where it is
    several micro-batches of the decoder, replicas and text shards of the first are counted before those of the second.

    uses: of each replica, for each token of pictures in its rows, in order, its place among those of the replica's
    pictures: sides of a pair show the same. owners: where ranks share a replica's row, the rank that has that token.
    sharing: how many they are."""

    pictures: Sequence[Picture]
    shards: Sequence[Pieces]
    cached: Sequence[CachedPicture]
    uses: Sequence[Tensor]
    owners: Sequence[Tensor] = ()
    sharing: int = 1

    @cached_property
    def sent(self) -> list[Sent]:
        """What each rank sends."""
        return [self._sent(pieces) for pieces in self.shards]

    def route(self, first: int, count: int) -> Route:
        """Which shard sends rows to which of `count` text shards from `first` on, counted from there."""
        own = ((rank, target - first) for rank, sent in enumerate(self.sent) for target in sorted(sent.places))
        return Route(tuple(pair for pair in own if 0 <= pair[1] < count))

    def placement(self, target: int) -> Tensor | None:
        """For each token of pictures that a text shard has, in order, its row among those received from the shards, one
        shard behind another, and behind them those of `cached_rows`; None where it has none."""
        received = [sent.places[target] for sent in self.sent if target in sent.places]
        received += [one.place + rows for one, rows in self._cached(target) if len(rows)]
        if not received:
            return None
        places, wanted = torch.cat(received), self._wanted(target)
        found = torch.empty(int(places.max()) + 1, dtype=torch.long)
        found[places] = torch.arange(len(places))
        return found[wanted]

    def cached_rows(self, target: int) -> dict[str, Tensor]:
        """Rows of pictures that no rank encodes and a text shard has tokens of, by name; none where it has none."""
        own = [(one.rows, rows) for one, rows in self._cached(target) if len(rows)]
        names = own[0][0] if own else ()
        return {name: torch.cat([_chosen(values[name], rows) for values, rows in own]) for name in names}

    def _cached(self, target: int) -> Iterator[tuple[CachedPicture, Tensor]]:
        """Cached pictures of the target's replica, and which of their rows it has."""
        for one in self.cached:
            if one.replica == target // self.sharing:
                needed = self._needed[target][one.place : one.place + one.tokens]
                yield one, needed.nonzero()[:, 0]

    def _wanted(self, target: int) -> Tensor:
        """The place of each token of pictures that a text shard has."""
        replica, rank = divmod(target, self.sharing)
        return self.uses[replica][self.owners[replica] == rank] if self.owners else self.uses[replica]

    @cached_property
    def _needed(self) -> list[Tensor]:
        """Of each text shard, which places of its replica's pictures it has tokens of, bool."""
        found = []
        for target in range(len(self.uses) * self.sharing):
            uses = self.uses[target // self.sharing]
            needed = torch.zeros(int(uses.max()) + 1 if len(uses) else 0, dtype=torch.bool)
            needed[self._wanted(target)] = True
            found.append(needed)
        return found

    def _sent(self, pieces: Pieces) -> Sent:
        """What a rank with these pieces sends."""
        found: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by target: rows of this rank, and their places
        first = 0
        for piece in pieces:
            picture = self.pictures[piece.image]
            places = _units(picture.layout, piece.first, piece.last) + picture.place
            for target in range(picture.replica * self.sharing, (picture.replica + 1) * self.sharing):
                rows = self._needed[target][places].nonzero()[:, 0]
                if len(rows):
                    found.setdefault(target, []).append((first + rows, places[rows]))
            first += len(places)
        if not found:
            return Sent({}, None)
        order = torch.cat([rows for target in sorted(found) for rows, _ in found[target]])
        in_order = len(order) == first and bool((order[1:] > order[:-1]).all())
        of_targets = {target: torch.cat([own for _, own in found[target]]) for target in sorted(found)}
        return Sent(of_targets, None if in_order else order)


@dataclass(frozen=True)
class Sent:
    """What a rank of an encoder sends. places: by text shard, the place of each row among the tokens of its
    replica's pictures. order: its rows, those of the first shard first, some for several; None: as they come."""

    places: Mapping[int, Tensor]
    order: Tensor | None


class Encoder:
    """Shards inputs over one encoder's ranks, for one model."""

    def __init__(self, name: str, tower: Tower, split: Split, draws: bool = False):
        """name: the part's. Patches travel in the split's dtype: the tower gets the same bits if it rounds them to this
        format first thing. draws: its adapters do."""
        self.tower, self.split, self._shown, self._draws = tower, split, _SHOWN[name], draws
        self._dtype: torch.dtype = getattr(torch, split.dtype)
        self._known_layout = lru_cache(maxsize=256)(tower.image_layout)

    def shard(
        self, rows: Sequence[Row], owners: Sequence[Tensor] = (), sharing: int = 1, keys: RowKeys = ()
    ) -> EncoderShards:
        """Shard one micro-batch. owners and sharing: see `EncoderShards`. keys: of the rows' samples, where its
        adapters draw."""
        pictures, cached, uses = self._pictures(rows, keys)
        work = [ImageWork(p.replica, p.layout.window_lengths, p.layout.frame_lengths) for p in pictures]
        crossover, own = self.tower.attention_crossover_patches, self.split
        sharded = shard_images(work, own.replicas, own.ranks, crossover, own.locality)
        shards = [pieces for replica in sharded for pieces in replica]
        return EncoderShards(pictures, shards, cached, uses, owners, sharing)

    def inputs(self, sharded: EncoderShards) -> tuple[VisionInput, ...]:
        """Each rank's input."""
        cuts = [self._cuts(sharded, pieces) for pieces in sharded.shards]
        forms, even = [[cut.form for cut in own if cut.form is not None] for own in cuts], self.split.even_calls
        calls = [self.tower.calls(own, even, self._draws) for own in forms]
        most = max(map(len, calls)) if even else 0
        filled = [own + ((),) * (most - len(own)) for own in calls]
        return tuple(self._input(sharded, rank, cuts[rank], filled[rank]) for rank in range(len(cuts)))

    def _pictures(self, rows: Sequence[Row], keys: RowKeys) -> tuple[list[Picture], list[CachedPicture], list[Tensor]]:
        """Pictures to encode, and those with cached features: work is balanced over the former alone. And the places of
        tokens (`EncoderShards.uses`)."""
        found, cached, uses = list[Picture](), list[CachedPicture](), list[Tensor]()
        for replica, row in enumerate(rows):
            place, before, of_row = 0, 0, [_NONE]
            of_samples = keys[replica] if self._draws else (None,) * len(row)
            for sample_key, sample in zip(of_samples, row, strict=True):
                if sample.again:  # shows those of the sample before it
                    of_row.append(torch.arange(before, place))
                    continue
                before = place
                for key, (pixels, grid, features) in with_keys(sample_key, self._shown(sample)):
                    if features is not None and features.tensors is not None:
                        cached.append(CachedPicture(replica, place, features.tensors))
                        place += cached[-1].tokens
                    else:
                        layout = self._layout(grid)
                        here = pixels if isinstance(pixels, LongVideo) else torch.from_numpy(pixels)
                        found.append(Picture(replica, here, layout, place, features, key))
                        place += len(layout.order)
                of_row.append(torch.arange(before, place))
            uses.append(torch.cat(of_row))
        return found, cached, uses

    def _layout(self, grid: Grid | ProcessorOutput) -> ImageLayout:
        """Layouts of images are cached, since sizes repeat; those of videos are large, and seldom repeat."""
        video = not isinstance(grid, ProcessorOutput) and grid[0] > 1
        return self.tower.image_layout(grid) if video else self._known_layout(grid)

    def _cuts(self, sharded: EncoderShards, pieces: Pieces) -> list[_Cut]:
        """The patches that a rank with these pieces encodes; a dummy where it has none."""
        if pieces:
            return [_cut(sharded.pictures[piece.image], piece.first, piece.last) for piece in pieces]
        tower, dummy = self.tower, self.tower.dummy_patches
        positions = torch.zeros(dummy, tower.position_columns, dtype=torch.long)
        run = (0, 0, dummy if tower.dummy_form is None else 1)
        pixels = tower.dummy_pixels(torch.empty(0))
        return [_Cut(_Rows(pixels, torch.arange(len(pixels))), positions, (dummy,), tower.dummy_form, run)]

    def _input(
        self, sharded: EncoderShards, rank: int, cuts: Sequence[_Cut], calls: tuple[tuple[int, ...], ...]
    ) -> VisionInput:
        first = rank - rank % self.split.ranks
        group = sharded.shards[first : first + self.split.ranks]
        layouts, sent = [picture.layout for picture in sharded.pictures], sharded.sent[rank]
        segment_lengths, shards = lay_out(layouts, group, self.tower.dummy_patches)
        pixels, unread = self._join([cut.pixels for cut in cuts])
        return VisionInput(
            pixels=pixels,
            positions=torch.cat([cut.positions for cut in cuts]),
            window_lengths=tuple(length for cut in cuts for length in cut.window_lengths),
            segment_lengths=segment_lengths,
            shards=shards,
            rows=tuple(len(sent.places[target]) for target in sorted(sent.places)),
            order=sent.order,
            forms=tuple(cut.form for cut in cuts if cut.form is not None),
            calls=calls,
            to_keep=tuple(_to_keep(sharded.pictures, group)),
            unread=unread,
            draws=tuple(cut.draws for cut in cuts) if self._draws else (),
        )

    def _join(self, pieces: Sequence[_Rows | UnreadPatches]) -> tuple[Tensor, tuple[Tensor | UnreadPatches, ...]]:
        """All patches in one tensor, or, where some are still in a file, none and the pieces."""
        there = [piece for piece in pieces if isinstance(piece, _Rows)]
        count = sum(len(piece.rows) for piece in pieces)
        if len(there) == len(pieces):
            joined = _room((count, *there[0].held.shape[1:]), self._dtype)
            for own, piece in zip(joined.split([len(piece.rows) for piece in there]), there, strict=True):
                piece.write(own)
            return joined, ()
        apart = (piece.held[piece.rows].to(self._dtype) if isinstance(piece, _Rows) else piece for piece in pieces)
        return torch.empty(count, 0, dtype=self._dtype), tuple(apart)


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor in large pages, as NumPy asks for: writing it costs a quarter of writing torch's own."""
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.empty(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


@dataclass(frozen=True)
class _Rows:
    """Some rows of a picture's patches, which are copied once."""

    held: Tensor
    rows: Tensor

    def write(self, out: Tensor) -> None:
        """Put them there. out: of as many rows, as wide."""
        if out.shape[1:] != self.held.shape[1:]:  # index_select would make room elsewhere
            raise ValueError(f"patches of {list(self.held.shape[1:])} among some of {list(out.shape[1:])}")
        if out.dtype == self.held.dtype:
            torch.index_select(self.held, 0, self.rows, out=out)
        else:
            out.copy_(self.held[self.rows])


@dataclass(frozen=True)
class _Cut:
    pixels: _Rows | UnreadPatches
    positions: Tensor
    window_lengths: tuple[int, ...]
    form: ProcessorOutput | None
    draws: DrawRun


def _cut(picture: Picture, first: int, last: int) -> _Cut:
    layout = picture.layout
    lengths = layout.window_lengths
    begin, end = sum(lengths[:first]), sum(lengths[:last])
    rows, held = layout.patch_order()[begin:end], picture.pixels
    pixels = UnreadPatches(held, rows) if isinstance(held, LongVideo) else _Rows(held, rows)
    run = (picture.key, begin, end - begin) if layout.form is None else (picture.key, 0, 1)
    return _Cut(pixels, layout.positions[begin:end], lengths[first:last], layout.form, run)


def _units(layout: ImageLayout, first: int, last: int) -> Tensor:
    """Merged tokens of windows `first` to `last`, as indices in processor order."""
    begin, end = (sum(layout.window_tokens[:w]) for w in (first, last))
    return layout.order[begin:end]


def _chosen(values: Tensor, rows: Tensor) -> Tensor:
    return values if len(rows) == len(values) else values[rows]


def _to_keep(pictures: Sequence[Picture], group: Sequence[Pieces]) -> Iterator[PictureRows]:
    """Of the pictures of a group of ranks, those whose features are to be cached, and which rank has which rows."""
    runs: dict[int, list[RowRun]] = {}
    for rank, pieces in enumerate(group):
        row = 0
        for piece in pieces:
            places = _units(pictures[piece.image].layout, piece.first, piece.last)
            runs.setdefault(piece.image, []).append(RowRun(rank, row, places))
            row += len(places)
    for image in sorted(runs):
        features = pictures[image].features
        if features is not None:
            yield PictureRows(features.key, features.about, tuple(runs[image]))
