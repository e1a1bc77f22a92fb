"""Loads of a layout's ranks: mean step and worst rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from dhp.core.axes import Degrees
from dhp.models.family import Family
from dhp.plan.count.row_bytes import TracedRows
from dhp.plan.count.unit_work import TextLoad, TowerLoad

if TYPE_CHECKING:
    from dhp.data.sampling.step_loads import StepLoads

MOST_COUNTS = 4096  # micro-batches whose numbers of pictures are looked at
_SQUARE = (1, 32, 32)  # a grid of patches, of which a tower's windows are read


@dataclass(frozen=True)
class PictureLoad:
    """Pictures of a mean micro-batch of all replicas. squares: Σ length² of their segments. features: tokens that they
    become. largest: patches of the largest picture. counts: pictures of some micro-batches."""

    patches: float = 0.0
    squares: float = 0.0
    pictures: float = 0.0
    features: float = 0.0
    largest: float = 0.0
    counts: tuple[int, ...] = ()

    @cached_property
    def _counts(self) -> np.ndarray:
        return np.array([count for count in self.counts if count], dtype=np.int64)

    def fullest(self, replicas: int) -> float:
        """Share of a micro-batch's pictures that the fullest replica has, where they go to replicas whole."""
        counts = self._counts
        if replicas == 1 or not len(counts):
            return 1.0 / replicas
        return float((-(-counts // replicas)).sum() / counts.sum())

    def of_pass(self, micro_batches: int, batch: int, counts: tuple[int, ...]) -> PictureLoad:
        """Of a mean pass over so many of a step's micro-batches, whose last pass may have fewer. counts: pictures of
        some passes."""
        share = micro_batches / -(-micro_batches // batch)
        sums = {name: share * getattr(self, name) for name in ("patches", "squares", "pictures", "features")}
        return replace(self, **sums, counts=counts)

    def divided(self, replicas: int, ranks: int) -> float:
        """Share of the pictures that the ranks of a replica's sequence divide: those beyond as many as they can have
        whole alike."""
        counts = -(-self._counts // replicas)
        if ranks == 1 or not len(counts):
            return 0.0
        return float((counts % ranks).sum() / counts.sum())


@dataclass(frozen=True)
class Worst:
    """The most that one rank gets of a micro-batch, before ranks of a sequence divide it. micro_batches: so many
    consecutive ones of a replica have together the most of any such run.

    tokens, features, targets: of a decoder's row. patches: of all replicas' pictures of a tower's pass; largest: of one
    of them."""

    tokens: int
    features: int
    targets: int
    patches: int = 0
    largest: int = 0
    step: int | None = None
    samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunLoads:
    """Of a run. text: of one micro-batch, of the replica that a mean step waits for. even: the same where replicas wait
    for one another in each micro-batch, as ZeRO's stages that gather or reduce then make them. pictures: of a mean
    micro-batch; passed: of a mean pass of a tower, which may be over several; worst: for bytes.

    step_tokens: of all replicas, in a mean step. steps: of an epoch. named: where the loads are from."""

    text: TextLoad
    even: TextLoad
    pictures: PictureLoad
    passed: PictureLoad
    worst: Worst
    step_tokens: float
    steps: int
    samples: int
    named: str


def loads_of_steps(
    steps: StepLoads, of_token: float, of_pair: float, patches_of_token: float, samples: int, batch: int = 1
) -> RunLoads:
    """From an epoch's steps as a run's sampler makes them. of_token, of_pair: a decoder's operations, by which the
    slowest replica is found. patches_of_token: used where patches were not measured. batch: micro-batches of a
    tower's pass."""
    work = steps.tokens * of_token + steps.pairs * of_pair
    count, micro_batches, replicas = steps.tokens.shape
    slowest = work.sum(axis=1).argmax(axis=1)[:, None, None]
    waited = np.take_along_axis(steps.tokens, slowest, 2), np.take_along_axis(steps.pairs, slowest, 2)
    each = work.argmax(axis=2)[:, :, None]
    met = np.take_along_axis(steps.tokens, each, 2), np.take_along_axis(steps.pairs, each, 2)
    pictures = _pictures(steps, patches_of_token)
    shown = np.add.reduceat(steps.pictures.sum(axis=2), range(0, micro_batches, batch), axis=1)
    passed = pictures.of_pass(micro_batches, batch, tuple(shown.ravel()[:MOST_COUNTS].tolist()))
    share = _targets(steps) / max(1.0, float(steps.totals["text"].mean()))
    text, even = (TextLoad(float(t.mean()), float(p.mean()), share * float(t.mean())) for t, p in (waited, met))
    return RunLoads(
        text,
        even,
        pictures,
        passed,
        _worst(steps, share, pictures, patches_of_token, batch),
        float(steps.tokens.sum((1, 2)).mean()),
        count,
        samples,
        f"{samples:,} samples",
    )


def _targets(steps: StepLoads) -> float:
    known = steps.totals.get("targets")
    return float((steps.totals["text"] / 4 if known is None else known).mean())


def _pictures(steps: StepLoads, patches_of_token: float) -> PictureLoad:
    micro_batches = steps.tokens.shape[1]
    totals = {name: float(values.mean()) / micro_batches for name, values in steps.totals.items()}
    features = totals["vision"]
    patches = totals.get("patches", features * patches_of_token)
    pictures = totals.get("pictures", features > 0)
    columns = steps.columns
    largest = 0.0
    if "pictures" in (columns.dtype.names or ()) and len(columns):
        several = np.maximum(columns["pictures"], 1)
        largest = float((columns["patches"] / several).max())
    mean = patches / pictures if pictures else 0.0
    counts = tuple(steps.pictures.sum(axis=2).ravel()[:MOST_COUNTS].tolist())
    return PictureLoad(patches, totals.get("squares", mean * patches), pictures, features, max(largest, mean), counts)


def _worst(steps: StepLoads, share: float, pictures: PictureLoad, patches_of_token: float, batch: int) -> Worst:
    row = steps.worst_row()
    own = steps.columns[list(row.samples)]
    targets = int(own["targets"].sum()) if "targets" in (own.dtype.names or ()) else ceil(share * row.tokens)
    of_micro_batches = steps.vision.sum(axis=2)
    starts = range(0, of_micro_batches.shape[1], batch)
    vision = int(np.add.reduceat(of_micro_batches, starts, axis=1).max())
    patches, largest = ceil(vision * patches_of_token), ceil(pictures.largest)
    return Worst(row.tokens, row.vision, max(1, targets), patches, largest, row.step, row.samples)


def even_loads(
    samples: int,
    tokens: int,
    features: int,
    targets: int,
    replicas: int,
    patches_of_token: float,
    micro_batches: int = 1,
    batch: int = 1,
) -> RunLoads:
    """Micro-batches of equal samples, before any was read. samples: in each row; tokens and so on: of one; a picture
    in each. replicas: of the decoder; micro_batches: of a step, so many of which are a tower's pass."""
    patches = round(features * patches_of_token)
    text = TextLoad(samples * tokens, samples * tokens**2, samples * targets)
    count = samples * replicas
    pictures = count * (features > 0)
    shown = PictureLoad(count * patches, count * patches**2, pictures, count * features, patches, (pictures,))
    worst = Worst(samples * tokens, samples * features, max(1, samples * targets), batch * count * patches, patches)
    sizes = (min(batch, micro_batches - first) for first in range(0, micro_batches, batch))
    passed = shown.of_pass(micro_batches, batch, tuple(size * pictures for size in sizes))
    named = f"{samples} samples of {tokens:,} tokens (assumed)"
    return RunLoads(text, text, shown, passed, worst, micro_batches * count * tokens, 0, 0, named)


def tower_load(pictures: PictureLoad, degrees: Degrees, window: float) -> TowerLoad:
    """Of the replica of an encoder that has most of a pass, of all ranks of its sequence together. pictures: of the
    pass. window: see `window_length`."""
    share = pictures.fullest(degrees.data)
    patches, squares = pictures.patches * share, pictures.squares * share
    return TowerLoad(patches, patches * window, squares, pictures.features * share, pictures.pictures * share)


def window_length(family: Family) -> float:
    """Patches that see each other in the tower's windows, mean over patches of a large picture."""
    try:
        lengths = family.tower.image_layout(_SQUARE).window_lengths
    except Exception:  # noqa: BLE001  # towers that cut pictures into tiles read no grid
        return 64.0
    return sum(length * length for length in lengths) / max(1, sum(lengths))


def text_rows(worst: Worst, degrees: Degrees) -> TracedRows:
    """The most that a rank of a decoder gets of a micro-batch."""
    split = degrees.sequence
    return TracedRows(ceil(worst.tokens / split), ceil(worst.features / split), max(1, ceil(worst.targets / split)))


def tower_rows(worst: Worst, degrees: Degrees) -> TracedRows:
    """The most that a rank of a tower gets of a pass: an even share of the fullest one's pictures, or where
    replicas take them whole the largest picture, if that is more."""
    whole = max(worst.patches / degrees.data, worst.largest)
    return TracedRows(0, patches=max(1, ceil(whole / degrees.sequence)))
