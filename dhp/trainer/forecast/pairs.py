"""Scores of both parts as they run together: each with the best of the other part that it fits with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from dhp.config.parts import DECODER
from dhp.models.family import VISION
from dhp.planner.units import Numbers
from dhp.trainer.forecast.score import Rows, Score

Scores = Mapping[str, Mapping[Rows, Sequence[Score]]]


@dataclass(frozen=True)
class Pair:
    """Scores of both parts, as they run together. vision: None where the run has no tower. apart: each part has devices
    of its own."""

    text: Score
    vision: Score | None
    apart: bool = False

    @cached_property
    def step_s(self) -> float:
        rows, text, vision = self.text.rows, self.text, self.vision
        if vision is None:
            return text.seconds
        if not self.apart:
            filled = rows.micro_batches + text.pipeline + vision.pipeline - 2
            return filled * (text.micro_batch_s + vision.micro_batch_s) + text.once_s + vision.once_s
        slower = max(text.micro_batch_s, vision.micro_batch_s)
        fill = text.pipeline * text.micro_batch_s + vision.pipeline * vision.micro_batch_s
        return (rows.micro_batches - 1) * slower + fill + max(text.once_s, vision.once_s)

    @property
    def vision_share(self) -> float:
        """Of the devices' work."""
        own = 0.0 if self.vision is None else self.vision.micro_batch_s
        return own / (own + self.text.micro_batch_s)

    @cached_property
    def peak_bytes(self) -> float:
        """Of the fullest device."""
        text, count = self.text, self.text.rows.micro_batches
        own = text.bytes(min(count, text.pipeline))
        if self.vision is None:
            return own
        further = text.pipeline + self.vision.pipeline - 1 + self.apart
        other = self.vision.bytes(min(count, further))
        return max(own, other) if self.apart else own + other

    @property
    def key(self) -> tuple[object, ...]:
        """Alike for pairs that differ in rows and recompute alone."""
        return self.text.layout, None if self.vision is None else self.vision.layout, self.apart


def join(scores: Scores, apart: bool, limit: float) -> Iterator[Pair]:
    """Pairs for each division: each layout of one part with the best of the other part that it fits with."""
    for rows, texts in scores[DECODER].items():
        if VISION not in scores:
            yield from (Pair(one, None) for one in texts)
            continue
        visions = scores[VISION].get(rows, [])
        if not texts or not visions:
            continue
        towers, decoders = _front(visions), _front(texts)
        chosen = _fastest(_Columns.of(texts), _Columns.of(towers), rows.micro_batches, apart, limit)
        yield from (Pair(one, towers[at], apart) for one, at in zip(texts, chosen, strict=True))
        others = _fastest(_Columns.of(visions), _Columns.of(decoders), rows.micro_batches, apart, limit)
        yield from (Pair(decoders[at], one, apart) for one, at in zip(visions, others, strict=True))


@dataclass(frozen=True)
class _Columns:
    """Scores of one part, as arrays."""

    micro_batch_s: Numbers
    once_s: Numbers
    stages: Numbers
    kept: Numbers
    held: Numbers
    decodes: bool

    @classmethod
    def of(cls, scores: Sequence[Score]) -> _Columns:
        rows = [
            (one.micro_batch_s, one.once_s, one.pipeline, one.kept_bytes + one.passing_bytes, one.held_bytes)
            for one in scores
        ]
        columns = np.array(rows, dtype=np.float64)
        decodes = scores[0].layout.part == DECODER
        return cls(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3], columns[:, 4], decodes)


def _fastest(one: _Columns, other: _Columns, count: int, apart: bool, limit: float) -> list[int]:
    """Of each of the first, the place of the other with which it is fastest and fits, else with which it is smallest.
    As `Pair` has seconds and bytes."""
    text, vision = (one, other) if one.decodes else (other, one)
    turn, back = (_down, _across) if one.decodes else (_across, _down)
    ahead = turn(np.minimum(count, text.stages))
    further = np.minimum(count, turn(text.stages) + back(vision.stages) - 1 + apart)
    own = turn(text.kept) + ahead * turn(text.held)
    of_tower = back(vision.kept) + further * back(vision.held)
    t, v = turn(text.micro_batch_s), back(vision.micro_batch_s)
    if apart:
        peak = np.maximum(own, of_tower)
        seconds = (count - 1) * np.maximum(t, v) + turn(text.stages) * t + back(vision.stages) * v
        seconds = seconds + np.maximum(turn(text.once_s), back(vision.once_s))
    else:
        peak = own + of_tower
        seconds = (count + turn(text.stages) + back(vision.stages) - 2) * (t + v)
        seconds = seconds + turn(text.once_s) + back(vision.once_s)
    fits = peak <= limit
    best = np.where(fits, seconds, inf).argmin(axis=1)
    least = peak.argmin(axis=1)
    found: list[int] = np.where(fits.any(axis=1), best, least).tolist()
    return found


def _down(values: Numbers) -> Numbers:
    return values[:, None]


def _across(values: Numbers) -> Numbers:
    return values[None, :]


def _front(scores: Sequence[Score]) -> list[Score]:
    """Those that no other beats in seconds and bytes."""
    found: list[Score] = []
    least = inf
    for one in sorted(scores, key=lambda own: (own.seconds, own.bytes(1))):
        if one.bytes(1) < least:
            found.append(one)
            least = one.bytes(1)
    return found
