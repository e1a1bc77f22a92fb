"""Seconds of a part's units as arrays over layouts, as `dhp.trainer.forecast.seconds` has them of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dhp.config.part import PartConfig
from dhp.core.axes import Degrees
from dhp.planner.rates import OVERLAP, Rates, Sent, Work
from dhp.planner.units import Numbers
from dhp.trainer.forecast.seconds import with_weights
from dhp.trainer.layer_work import Passes, recomputed


@dataclass(frozen=True)
class Turns:
    """Of units of a micro-batch, before weights and gradients are exchanged: seconds of what is done in turn, and of
    the host. there, back: of each unit; again: of each unit and choice of recompute, that its backward has besides."""

    there: Numbers  # [2, units]
    back: Numbers  # [2, units]
    again: Numbers  # [2, units, choices]


def turns_of(
    passes: Sequence[Passes], shares: Sequence[Sequence[float]], choices: Sequence[str], rates: Rates
) -> Turns:
    """shares: of a forward that each choice runs again, of each unit."""
    there, back = (
        np.array([_in_turn(getattr(one, name), rates) for one in passes]).T for name in ("forward", "backward")
    )
    again = np.array(
        [
            [_again(one.forward, choice, share, rates) for choice, share in zip(choices, own, strict=True)]
            for one, own in zip(passes, shares, strict=True)
        ]
    )
    return Turns(there, back, np.moveaxis(again, 2, 0))


def _again(forward: Work, choice: str, share: float, rates: Rates) -> tuple[float, float]:
    return _in_turn(recomputed(forward, choice, share), rates) if share else (0.0, 0.0)


def _in_turn(work: Work, rates: Rates) -> tuple[float, float]:
    done = work.products / rates.products + work.attention / rates.attention + work.elementwise / rates.elementwise
    return done + seconds_of(work.sent, rates), work.launched * rates.host_s


def seconds_of(sends: Sequence[Sent], rates: Rates) -> float:
    """Of all of them, one after another."""
    return sum(one.seconds(rates) for one in sends)


def exchanged(held: Sequence[int], section: PartConfig, degrees: Degrees, rates: Rates) -> Numbers:
    """Seconds of weights and gradients that a micro-batch exchanges, of units that hold so many parameters: hidden in a
    forward, hidden in a backward, and waited for there. [3, units]"""
    found = []
    for count in held:
        own = with_weights(Passes(Work(), Work()), count, section, degrees)
        sends = (own.forward.hidden, own.backward.hidden, own.backward.sent)
        found.append([seconds_of(one, rates) for one in sends])
    return np.array(found).T


def unit_times(turns: Turns, more: Numbers, back: bool, ahead: bool) -> Numbers:
    """Seconds of each unit's passes over a micro-batch, by choice of recompute. turns: of layouts along a first axis of
    each; more: see `exchanged`. back: there is a backward. ahead: see `Rates`. [layouts, units, choices]"""
    there = together(turns.there[:, 0], more[:, 0], turns.there[:, 1], ahead)[..., None]
    if not back:
        return np.broadcast_to(there, (*there.shape[:-1], turns.again.shape[-1]))
    waits, host = (turns.back[:, 0] + more[:, 2])[..., None], turns.back[:, 1][..., None]
    again = together(waits + turns.again[:, 0], more[:, 1][..., None], host + turns.again[:, 1], ahead)
    return there + again


def together(in_turn: Numbers, hidden: Numbers, host: Numbers, ahead: bool) -> Numbers:
    """As `dhp.planner.rates.spend` joins them."""
    if not ahead:
        return in_turn + hidden + host
    most = np.maximum(np.maximum(in_turn, hidden), host)
    scale = np.where(most > 0, most, 1.0)
    parts = ((one / scale) ** OVERLAP for one in (in_turn, hidden, host))
    found: Numbers = most * sum(parts) ** (1 / OVERLAP)
    return found


def stacked(each: Sequence[Turns]) -> Turns:
    """Along a first axis."""
    return Turns(*(np.stack([getattr(one, name) for one in each]) for name in ("there", "back", "again")))
