"""The least seconds of recomputing for which a run of units keeps no more than some bytes of a micro-batch.

Each unit takes one of its choices, so this is a knapsack with classes (Kellerer et al. 2004, "Knapsack Problems",
chapter 11). Units with the same choices are of one kind; what matters of a run is how many it has of each. For a kind
and a number all that is worth choosing is a *front*: sums of bytes, and the least seconds of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dhp.planner.units import Numbers, Saved, Unit

Option = tuple[str, Saved]  # a choice of recompute by its name


@dataclass(frozen=True)
class Front:
    """held: bytes, ascending; seconds: of recomputing, descending: no point is worse in both than another."""

    held: Numbers
    seconds: Numbers

    def plus(self, other: Front) -> Front:
        """The front of two runs together."""
        held = (self.held[:, None] + other.held[None, :]).ravel()
        return pareto(held, (self.seconds[:, None] + other.seconds[None, :]).ravel())

    def least(self, caps: Numbers) -> Numbers:
        """The least seconds with no more bytes than each cap; inf where there is none."""
        at = np.searchsorted(self.held, caps, side="right") - 1
        return np.where(at >= 0, self.seconds[at], np.inf)


EMPTY = Front(np.zeros(1), np.zeros(1))


def pareto(held: Numbers, seconds: Numbers) -> Front:
    """Of these points, those that no other one is as good as in both."""
    order = np.lexsort((seconds, held))
    held, seconds = held[order], seconds[order]
    best = np.minimum.accumulate(seconds)
    keeps = np.concatenate([[True], seconds[1:] < best[:-1]])
    return Front(held[keeps], seconds[keeps])


class Fronts:
    """The fronts of a chain's runs. first: the first unit through which a backward goes; those before keep nothing."""

    def __init__(self, units: Sequence[Unit], first: int):
        self._units, self._first = units, first
        options = [self.options(at) for at in range(len(units))]
        self._kinds = list(dict.fromkeys(own for own in options if len(own) > 1))
        counts = np.array([[own == kind for own in options] for kind in self._kinds], dtype=int)
        counts = counts.reshape(len(self._kinds), len(units))
        self._counts = np.concatenate([np.zeros((len(self._kinds), 1), dtype=int), counts.cumsum(axis=1)], axis=1)
        self._of_kind: dict[tuple[int, int], Front] = {}
        self._joined: dict[tuple[int, ...], Front] = {(): EMPTY}

    def options(self, at: int) -> tuple[Option, ...]:
        """The choices of one unit that are worth a thought, those that keep least first."""
        if at < self._first:
            return (("none", Saved(0.0)),)
        every = sorted(self._units[at].saved.items(), key=lambda one: (one[1].held_bytes, one[1].replay_s))
        found: list[Option] = []
        for name, saved in every:
            if not found or saved.replay_s < found[-1][1].replay_s:
                found.append((name, saved))
        return tuple(found)

    @cached_property
    def single(self) -> Numbers:
        """Of each unit without a choice, what it keeps; 0 of others."""
        own = [self.options(at) for at in range(len(self._units))]
        return np.array([options[0][1].held_bytes if len(options) == 1 else 0.0 for options in own])

    def least(self, first: int, end: int, caps: Numbers) -> Numbers:
        """The least seconds for which the units from `first` to `end` that have a choice keep no more than each cap."""
        counts = self._counts[:, end] - self._counts[:, first]
        fronts = [self._of(kind, int(count)) for kind, count in enumerate(counts) if count]
        if not fronts:
            return np.where(caps >= 0, 0.0, np.inf)
        largest = max(range(len(fronts)), key=lambda at: len(fronts[at].held))
        rest = self._rest(counts, [at for at, count in enumerate(counts) if count][largest])
        left = caps[None, :] - rest.held[:, None]
        found: Numbers = np.min(fronts[largest].least(left) + rest.seconds[:, None], axis=0)
        return found

    def _rest(self, counts: NDArray[np.int_], without: int) -> Front:
        """The front of all kinds but one together."""
        key = tuple(0 if kind == without else int(count) for kind, count in enumerate(counts))
        if key not in self._joined:
            front = EMPTY
            for kind, count in enumerate(key):
                front = front.plus(self._of(kind, count)) if count else front
            self._joined[key] = front
        return self._joined[key]

    def _of(self, kind: int, count: int) -> Front:
        if count == 0:
            return EMPTY
        if (kind, count) not in self._of_kind:
            held = np.array([saved.held_bytes for _, saved in self._kinds[kind]])
            one = Front(held, np.array([saved.replay_s for _, saved in self._kinds[kind]]))
            self._of_kind[kind, count] = self._of(kind, count - 1).plus(one)
        return self._of_kind[kind, count]

    def choose(self, first: int, end: int, cap: float) -> tuple[str, ...]:
        """Of the units from `first` to `end`, the choices with the least seconds that keep no more than `cap`. Of units
        alike the first ones keep least: what a stage's last ones keep is freed first. Raises ValueError where none do.
        """
        points: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
        for at in range(first, end):
            options = [saved for _, saved in self.options(at)]
            grown = [
                (held + one.held_bytes, seconds + one.replay_s, (*chosen, option))
                for held, seconds, chosen in points
                for option, one in enumerate(options)
            ]
            points = _worth(sorted(grown, key=lambda point: point[:2]), cap)
        if not points:
            raise ValueError(f"the units from {first} to {end} keep more than {cap:.0f} bytes whatever is recomputed")
        chosen = min(points, key=lambda point: point[1])[2]
        return self._ordered(first, chosen)

    def _ordered(self, first: int, chosen: tuple[int, ...]) -> tuple[str, ...]:
        of_kind: dict[tuple[Option, ...], list[int]] = {}
        for at, option in enumerate(chosen, first):
            of_kind.setdefault(self.options(at), []).append(option)
        queues = {kind: iter(sorted(options)) for kind, options in of_kind.items()}
        every = (self.options(first + at) for at in range(len(chosen)))
        return tuple(options[next(queues[options])][0] for options in every)


def _worth(
    points: Sequence[tuple[float, float, tuple[int, ...]]], cap: float
) -> list[tuple[float, float, tuple[int, ...]]]:
    found: list[tuple[float, float, tuple[int, ...]]] = []
    for point in points:
        if point[0] <= cap and (not found or point[1] < found[-1][1]):
            found.append(point)
    return found
