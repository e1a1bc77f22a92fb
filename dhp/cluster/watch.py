"""Wait for what was submitted, and turn the first failure of any rank into one readable error. Never a hang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from dhp.errors import DhpError, PartFailed


@dataclass(frozen=True)
class Watched:
    """A submitted call: who runs it, what it is, and the ref that tells whether it worked."""

    who: str
    what: str
    ref: Any


def wait_all(watched: Sequence[Watched], timeout_s: float) -> None:
    """Return when all calls have worked.

    Raises as soon as one fails, without waiting for ranks that hang in a collective because of it: DhpErrors of a
    worker as they are, anything else as PartFailed. Raises PartFailed when nothing finishes for `timeout_s`.
    """
    waiting = {entry.ref: entry for entry in watched}
    while waiting:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout_s)
        if not ready:
            raise PartFailed(_stuck(list(waiting.values()), timeout_s))
        more, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        for ref in more or ready:
            _check(waiting.pop(ref), list(waiting.values()))


def fetch(ref: Any, who: str, what: str, timeout_s: float) -> Any:
    """The value behind a ref, with the errors of `wait_all`."""
    wait_all([Watched(who, what, ref)], timeout_s)
    return ray.get(ref)


def _check(entry: Watched, others: Sequence[Watched]) -> None:
    try:
        ray.get(entry.ref, timeout=0)
    except GetTimeoutError:
        raise PartFailed(f"{entry.who} finished {entry.what}, but its result is lost") from None
    except RayTaskError as error:
        raise _readable(entry, error, others) from None
    except RayActorError as error:
        raise PartFailed(_death(entry, error)) from None
    except RayError as error:
        raise PartFailed(f"{entry.who} in {entry.what}: {type(error).__name__}: {error}") from error


def _readable(entry: Watched, error: RayTaskError, others: Sequence[Watched]) -> DhpError:
    cause = error.cause
    if isinstance(cause, RayActorError):
        return PartFailed(_death(entry, cause))
    if isinstance(cause, DhpError):
        return cause
    dead = _find_death(others)
    if dead is not None:  # a rank that lost its neighbour only sees a broken connection
        return dead
    return PartFailed(f"{entry.who} failed in {entry.what}: {type(cause).__name__}: {cause}\n{error}")


def _find_death(others: Sequence[Watched]) -> PartFailed | None:
    ready, _ = ray.wait([e.ref for e in others], num_returns=len(others), timeout=1.0) if others else ([], [])
    entries = {entry.ref: entry for entry in others}
    for ref in ready:
        try:
            ray.get(ref)
        except ActorDiedError as error:
            return PartFailed(_death(entries[ref], error))
        except RayError:
            continue
    return None


def _death(entry: Watched, error: RayActorError) -> str:
    return (
        f"{entry.who} died during {entry.what}: {error}\n"
        "Potential causes: the process ran out of memory and was killed, a native library crashed, or its node was "
        "lost. The rank's own log is in the run directory's logs/"
    )


def _stuck(waiting: Sequence[Watched], timeout_s: float) -> str:
    shown = "; ".join(f"{entry.who} in {entry.what}" for entry in waiting[:6])
    return (
        f"no call finished for {timeout_s:g} s. Unfinished: {shown}. A slow step needs a larger "
        "cluster.step_timeout_s; a rank that waits for another one in a collective is a defect: see logs/"
    )
