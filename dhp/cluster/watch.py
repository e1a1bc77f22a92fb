"""Wait for what was submitted, and turn the first failure of any rank into one readable error. Never a hang."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from dhp.cluster.call_file import read_calls
from dhp.cluster.processes import stopped_descendants
from dhp.cluster.servers import CHECK_S, require_servers
from dhp.cluster.stacks import SUFFIX, describe, odd_ones, take_stacks
from dhp.core.errors import DIED, DRAINED, HUNG, LOST, RAISED, DhpError, Fault, PartFailed, RankRaised

DEATH_TIMEOUT_S = 5.0  # how long a neighbour's death may take to be known after its connections broke
_NODE_DIED = "its node has died"  # in Ray's message of an actor's death


@dataclass(frozen=True)
class Watched:
    """A submitted call: the actor's name, what it is, the ref of its status, Ray's id of the actor, the file
    of its collectives (`dhp.cluster.call_file`), the name of its node; empty on the machine of the run itself."""

    who: str
    what: str
    ref: Any
    actor: str = ""
    calls: str | None = None
    node: str = ""

    def fault(self, kind: str) -> Fault:
        """A fault of this call."""
        return Fault(kind, self.who, self.what, self.node)


def wait_all(watched: Sequence[Watched], timeout_s: float, until: Any = None) -> bool:
    """Return when all calls have worked: True. Or when the ref `until` is ready before that: False.

    Raises as soon as one fails, without waiting for ranks that hang in a collective because of it: DhpErrors of a
    worker as they are, anything else as PartFailed. Raises PartFailed when nothing finishes for `timeout_s`, and
    ClusterError when a server of the run's own Ray ends.
    """
    names = {entry.actor: entry for entry in watched}
    waiting = {entry.ref: entry for entry in watched}
    others = [] if until is None or until in waiting else [until]
    deadline = time.monotonic() + timeout_s
    while waiting:
        require_servers()
        left = max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait([*others, *waiting], num_returns=1, timeout=min(CHECK_S, left))
        if not ready and left > CHECK_S:
            continue
        if not ready:
            raise _stuck(list(waiting.values()), timeout_s)
        deadline = time.monotonic() + timeout_s
        if ready == others:
            return False
        more, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        for ref in more or ready:
            _check(waiting.pop(ref), list(waiting.values()), names)
    return True


def fetch(entry: Watched, timeout_s: float) -> Any:
    """The value behind a watched ref, with the errors of `wait_all`."""
    wait_all([entry], timeout_s)
    return ray.get(entry.ref)


def _check(entry: Watched, others: Sequence[Watched], names: Mapping[str, Watched]) -> None:
    try:
        ray.get(entry.ref, timeout=0)
    except GetTimeoutError:
        raise PartFailed(f"{entry.who} finished {entry.what}, but its result is lost", entry.fault(LOST)) from None
    except RayTaskError as error:
        raise _readable(entry, error.cause, others, names) from None
    except RayActorError as error:
        raise _death(entry, error, names) from None
    except RayError as error:
        text = f"{entry.who} in {entry.what}: {type(error).__name__}: {error}"
        raise PartFailed(text, entry.fault(LOST)) from error  # what Ray itself fails of


def _readable(entry: Watched, cause: Exception, others: Sequence[Watched], names: Mapping[str, Watched]) -> DhpError:
    if isinstance(cause, RayActorError):
        return _death(entry, cause, names)
    if isinstance(cause, DhpError) and not isinstance(cause, RankRaised):
        return cause
    # A rank that lost its neighbour only sees a broken connection.
    dead = _find_death(others, names)
    if dead is not None:
        return dead
    if isinstance(cause, RankRaised):
        return PartFailed(str(cause), entry.fault(RAISED))
    text = f"{entry.who} failed in {entry.what}: {type(cause).__name__}: {cause}"
    return PartFailed(text, entry.fault(RAISED))


def _find_death(others: Sequence[Watched], names: Mapping[str, Watched]) -> DhpError | None:
    """The death of an actor among the calls that are still open, if one becomes known soon."""
    waiting = {entry.ref: entry for entry in others}
    end = time.monotonic() + DEATH_TIMEOUT_S
    while waiting and time.monotonic() < end:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, end - time.monotonic()))
        for ref in ready:
            entry = waiting.pop(ref)
            try:
                ray.get(ref, timeout=0)
            except RayActorError as error:
                return _death(entry, error, names)
            except RayTaskError as error:
                if isinstance(error.cause, RayActorError):
                    return _death(entry, error.cause, names)
            except RayError:
                continue
    return None


def _death(entry: Watched, error: RayActorError, names: Mapping[str, Watched]) -> DhpError:
    require_servers(at_once=True)  # or a rank would be blamed for the end of Ray
    dead = names.get(error.actor_id or "", entry)
    who = dead.who
    when = f"during {entry.what}" if who == entry.who else f"while {entry.who} waited for it in {entry.what}"
    reason = str(error).split(" Some common causes", 1)[0].strip()
    kind = LOST if isinstance(error, ActorUnavailableError) or _NODE_DIED in reason else DIED
    where = f" on node {dead.node}" if dead.node else ""
    return PartFailed(
        f"{who}{where} died {when}: {reason}\n"
        "Potential causes: the process ran out of memory and was killed, a native library crashed, or its node was "
        "lost. The actor's own log is in the run directory's logs/, or in Ray's log where its node cannot write there",
        dead.fault(DRAINED if error.preempted else kind),
    )


def _stuck(waiting: Sequence[Watched], timeout_s: float) -> PartFailed:
    # Each actor works in order: what it hangs in is the first of its open calls.
    first = {entry.who: entry for entry in reversed(waiting)}
    shown = "; ".join(f"{who} in {first[who].what}" for who in sorted(first))
    calls = {who: read_calls(first[who].calls) for who in sorted(first)}
    quoted = "".join(f"\n  {who}: {said}" for who, said in calls.items() if said)
    frozen, stacks = stopped_descendants(), take_stacks([_log_name(who) for who in first])
    stopped = "".join(
        f"{name} is stopped (SIGSTOP; `kill -CONT {pid}` lets it go on). " for name, pid in frozen.items()
    )
    odd = odd_ones(stacks)
    if odd and not frozen:
        stopped = f"{', '.join(odd)} is not where the others of its part are, who may wait for it. "
    if stacks:
        quoted += f"\nWhere they stand (whole stacks in logs/*{SUFFIX}):{describe(stacks)}"
    return PartFailed(
        f"no call finished for {timeout_s:g} s. Unfinished: {shown}. {stopped}A slow step needs a larger "
        "cluster.step_timeout_s (a slow start a larger cluster.start_timeout_s). Ranks that share a group and began "
        "unequally many collectives in it wait for one another: that is a defect, which cluster.check_collectives=true "
        f"finds where it begins; see logs/{quoted}",
        Fault(HUNG, _culprits(first, [*frozen] or odd), ", ".join(dict.fromkeys(e.what for e in first.values()))),
    )


def _culprits(first: Mapping[str, Watched], known: Sequence[str]) -> str:
    """Those of the open calls that are known to hold up the others, by the names of their logs; else all."""
    return ", ".join(sorted(who for who in first if _log_name(who) in known) or sorted(first))


def _log_name(who: str) -> str:
    """`text-1` of `text rank 1`, as an actor's log is called."""
    return who.replace(" rank ", "-")
