"""Decides after each attempt whether to start again."""

from collections.abc import Sequence
from dataclasses import dataclass

from dhp.core.errors import DRAINED, RAISED
from dhp.core.process import INTERRUPTED as INTERRUPTED_STATUS
from dhp.supervise.attempt import COMPLETED, INTERRUPTED, ONCE_TRAINED, SAVING, TRAINING, Verdict

LONGEST_WAIT_S = 300.0


@dataclass(frozen=True)
class Rules:
    """max_restarts: since the newest checkpoint. wait_s: before the first of them; twice as long before each next."""

    max_restarts: int
    wait_s: float


@dataclass(frozen=True)
class Ended:
    """An attempt that has ended. saved: it finished a checkpoint. moves: the next one has another layout."""

    verdict: Verdict
    saved: bool = False
    moves: bool = False


@dataclass(frozen=True)
class Restart:
    """Start again after `after_s` seconds. number: of the restarts since the newest checkpoint, from 1; 0: it is not
    counted, for `uncounted` says why."""

    after_s: float
    number: int
    uncounted: str = ""


@dataclass(frozen=True)
class Stop:
    """End with an exit status. reason: in words; empty where the run's own message says all."""

    status: int
    reason: str = ""


def decide(history: Sequence[Ended], rules: Rules) -> Restart | Stop:
    """What follows the last attempt of `history`, which has all of this run, in order."""
    last = history[-1].verdict
    if last.kind == COMPLETED:
        return Stop(0)
    if last.kind == INTERRUPTED:
        return Stop(INTERRUPTED_STATUS)
    if history[-1].moves:
        return Restart(0.0, 0, "it goes on in another layout")
    if not last.restartable or last.kind in ONCE_TRAINED and not any(_trained(one) for one in history):
        return Stop(1)
    before = _same_before(history)
    if before is not None:
        return Stop(1, f"attempt {before.attempt} ended in the same way {_place(last)}: another would too")
    used = len([one for one in _since_checkpoint(history) if one.verdict.kind != DRAINED and not one.moves])
    if last.kind == DRAINED:
        return Restart(rules.wait_s, 0, "its node was drained")
    if used > rules.max_restarts:
        return Stop(1, f"training.max_restarts={rules.max_restarts} are used up since the newest checkpoint")
    return Restart(min(rules.wait_s * 2 ** (used - 1), max(LONGEST_WAIT_S, rules.wait_s)), used)


def _trained(ended: Ended) -> bool:
    return ended.saved or ended.verdict.state in (TRAINING, SAVING)


def _since_checkpoint(history: Sequence[Ended]) -> Sequence[Ended]:
    """The attempts that ended after the newest checkpoint: from the one that finished it on."""
    newest = max((number for number, one in enumerate(history) if one.saved), default=0)
    return history[newest:]


def _same_before(history: Sequence[Ended]) -> Verdict | None:
    """An earlier attempt that ended by the same exception of the run's own at the same step. Deaths, lost nodes, hangs
    and what Ray itself fails of say nothing about the next attempt."""
    last = history[-1].verdict
    if last.kind != RAISED:
        return None
    return next((one.verdict for one in history[:-1] if _mark(one.verdict) == _mark(last)), None)


def _mark(verdict: Verdict) -> tuple[object, ...]:
    return verdict.kind, verdict.error, verdict.headline(), verdict.step


def _place(verdict: Verdict) -> str:
    return "before its first step" if verdict.step is None else f"at step {verdict.step}"
