"""Samples with exchanged images: the increase of the loss measures how much a model uses them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from dhp.core.errors import DataError
from dhp.data.media.sources import File, SizedImage, Sound, Video
from dhp.data.read.records import Record, Turn

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
