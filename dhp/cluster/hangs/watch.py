"""Waits for submitted calls; reports the first failure."""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.client import ray as client

from dhp.cluster.hangs.lookout import Lookout, Seen, Stall, find_stall, frames, named, suspects
from dhp.cluster.hangs.vitals import STACKS_SUFFIX, describe
from dhp.cluster.ray_private import key_exists
from dhp.cluster.servers import CHECK_S, require_servers
from dhp.core.errors import DIED, DRAINED, HUNG, LOST, RAISED, ClusterError, DhpError, Fault, PartFailed, RankRaised

QUESTIONS = 6  # without an answer, in a row: half a minute. No clock says it: this process may have been stopped itself
_EVERY_S = 5.0
_ANSWER_S = 5.0
_KEY = b"dhp"  # of nothing: whether it exists is the shortest question


class _Answers:
    """How many of the last questions had none."""

    missing = 0


class _Asked:
    """Of this process's Ray; None: nobody asks."""

    now: _Answers | None = None


@contextmanager
def asking() -> Iterator[None]:
    """In the block a thread asks it again and again. Not through Ray's client (`ray://`), which has no way to it."""
    if client.is_connected():
        yield
        return
    ended, _Asked.now = threading.Event(), _Answers()
    asker = threading.Thread(target=_ask, args=(ended, _Asked.now), name="control store", daemon=True)
    asker.start()
    try:
        yield
    finally:
        ended.set()
        asker.join(_ANSWER_S)
        _Asked.now = None


def require_answers() -> None:
    """Raise ClusterError where it has not answered the last `QUESTIONS`."""
    answers = _Asked.now
    if answers is not None and answers.missing >= QUESTIONS:
        raise ClusterError(
            f"Ray's control store (gcs_server, on the cluster's head) has not answered {QUESTIONS} questions in a row, "
            f"each within {_ANSWER_S:g} s, and the run ends: without it no actor can be started or ended, and no death "
            "of a node is known. It was killed or stopped there, or the network to the head is gone: see `ray status` "
            "and gcs_server.err on the head, start the cluster again, and continue with training.resume=auto"
        )


def _ask(ended: threading.Event, answers: _Answers) -> None:
    spent_s = 0.0
    while not ended.wait(max(0.0, _EVERY_S - spent_s)):
        begun = time.monotonic()
        try:
            key_exists(_KEY, _ANSWER_S)
            answers.missing = 0
        except Exception:  # whatever Ray raises of it, there was no answer; `require_answers` reports that
            answers.missing += 1
        spent_s = time.monotonic() - begun


DEATH_TIMEOUT_S = 5.0  # how long a neighbour's death may take to be known after its connections broke
_NODE_DIED = "its node has died"  # in Ray's message of an actor's death


@dataclass(frozen=True)
class Watched:
    """A submitted call: the actor's name, what it is, the ref of its status, Ray's id of the actor, the name of its
    node, empty on the machine of the run itself; and who looks at the run's processes from outside."""

    who: str
    what: str
    ref: Any
    actor: str = ""
    node: str = ""
    lookout: Lookout | None = None

    def __str__(self) -> str:
        return f"{self.who} on node {self.node}" if self.node else self.who

    def fault(self, kind: str) -> Fault:
        """A fault of this call."""
        return Fault(kind, self.who, self.what, self.node)


def wait_all(watched: Sequence[Watched], timeout_s: float, until: Any = None) -> bool:
    """Return when all calls have worked: True. Or when the ref `until` is ready before that: False.

    Raises as soon as one fails, without waiting for ranks that hang in a collective because of it: DhpErrors of a
    worker as they are, anything else as PartFailed. Raises PartFailed when nothing finishes for `timeout_s`, or when a
    collective holds a rank for longer than cluster.collective_timeout_s, and ClusterError when a server of the run's
    own Ray ends or stops, or Ray's control store does not answer."""
    names = {entry.actor: entry for entry in watched}
    waiting = {entry.ref: entry for entry in watched}
    others = [] if until is None or until in waiting else [until]
    deadline = time.monotonic() + timeout_s
    while waiting:
        require_servers()
        require_answers()
        left = max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait([*others, *waiting], num_returns=1, timeout=min(CHECK_S, left))
        if not ready and left > CHECK_S:
            _require_progress(watched)
            continue
        if not ready:
            require_servers(at_once=True, stopped_s=0.0)  # or a rank would be blamed for a server that is stopped
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
        raise PartFailed(f"{entry} finished {entry.what}, but its result is lost", entry.fault(LOST)) from None
    except RayTaskError as error:
        raise _readable(entry, error.cause, others, names) from None
    except RayActorError as error:
        raise _death(entry, error, names) from None
    except RayError as error:
        text = f"{entry} in {entry.what}: {type(error).__name__}: {error}"
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
        return _raised(cause, names)
    text = f"{entry} failed in {entry.what}: {type(cause).__name__}: {cause}"
    return PartFailed(text, entry.fault(RAISED))


def _raised(error: RankRaised, names: Mapping[str, Watched]) -> PartFailed:
    """What an actor raised, which another one may have received that depends on it: with the node of the first."""
    fault = error.fault
    node = next((entry.node for entry in names.values() if entry.who == fault.who), "")
    where = f"{fault.who} on node {node}" if node else fault.who
    return PartFailed(str(error).replace(fault.who, where, 1), replace(fault, node=node))


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
    when = f"during {entry.what}" if dead.who == entry.who else f"while {entry.who} waited for it in {entry.what}"
    reason = str(error).split(" Some common causes", 1)[0].strip()
    lost = isinstance(error, ActorUnavailableError) or _NODE_DIED in reason
    kind = DRAINED if error.preempted else LOST if lost else DIED
    return PartFailed(
        f"{_end_of(dead, kind)} {when}: {reason}\n"
        "Potential causes: the process ran out of memory and was killed, a native library crashed, or its node was "
        "lost. The actor's own log is in the run directory's logs/, or in Ray's log where its node cannot write there",
        dead.fault(kind),
    )


def _end_of(dead: Watched, kind: str) -> str:
    """`text rank 1 on node 10.0.0.6 died`; of a node that is gone, that one first: it took the rank along."""
    if kind == LOST and dead.node:
        return f"node {dead.node} was lost, or cannot be reached, and {dead.who} with it,"
    return f"{dead} was lost, or cannot be reached," if kind == LOST else f"{dead} died"


def _require_progress(watched: Sequence[Watched]) -> None:
    """Raise PartFailed where a collective has held a rank of the run for too long."""
    for lookout in {entry.lookout for entry in watched if entry.lookout is not None}:
        stall = lookout.watch()
        if stall is not None:
            seen = lookout.look(stacks=True)
            again = find_stall(seen, lookout.collective_s)
            # Stacks take a node longer: that it has no time for them does not make it the one that is waited for.
            known = stall if again is None or again.silent and not stall.silent else again
            raise _held(known, seen, lookout.collective_s)


def _held(stall: Stall, seen: Mapping[str, Seen], limit_s: float) -> PartFailed:
    waiting, causes = stall.waiting, stall.causes or suspects(seen, list(seen))
    assert waiting.beat is not None
    missing = {one.who for one in stall.missing}
    others = [one for one in causes if one.who not in missing]
    text = f"{_waiting(stall, limit_s)}: {waiting.beat.call}. "
    text += f"Held up by {named(others)}. " if others else ""
    if waiting.beat.device and not stall.missing:
        text += (
            "A device or a link between devices may be stuck: see `nvidia-smi` and Xid lines of the kernel's log on "
            "the nodes of these ranks. "
        )
    return PartFailed(
        f"{text}The limit is cluster.collective_timeout_s={limit_s:g}: a rank that is only slow, as one that compiles "
        "alone, needs a larger one. Ranks that begin unequally many collectives are a defect, which "
        f"cluster.check_collectives=true finds where it begins{_quoted(seen, causes)}",
        _blamed(causes or list(stall.missing) or [waiting]),
    )


def _waiting(stall: Stall, limit_s: float) -> str:
    """Who waits for whom, how long, in a collective."""
    waiting, missing = stall.waiting, stall.missing
    held_s = f"{waiting.held_s or limit_s:.0f} s"
    if missing and all(one.silent for one in missing):
        nodes = ", ".join(dict.fromkeys(one.node for one in missing))
        return f"node {nodes} does not answer: {waiting} has waited for {named(missing)} for {held_s} in a collective"
    if missing and all(one.stands for one in missing):
        return f"{named(missing)} is stopped or gone: {waiting} has waited for it for {held_s} in a collective"
    if missing:
        return f"{named(missing)} did not enter a collective in which {waiting} has waited for {held_s}"
    if waiting.beat is not None and waiting.beat.device:
        ranks = ", ".join(map(str, waiting.beat.members))
        return f"{waiting} has waited for {held_s} in a collective that all of its group (ranks {ranks}) have begun"
    return f"{waiting} has waited for {held_s} in a collective, and so have all of its group, in unlike ones"


def _stuck(waiting: Sequence[Watched], timeout_s: float) -> PartFailed:
    # Each actor works in order: what it hangs in is the first of its open calls.
    first = {entry.who: entry for entry in reversed(waiting)}
    shown = "; ".join(f"{first[who]} in {first[who].what}" for who in sorted(first))
    lookouts = {entry.lookout for entry in waiting if entry.lookout is not None}
    seen = {who: one for lookout in lookouts for who, one in lookout.look(stacks=True).items()}
    causes = suspects(seen, list(first))
    blamed = f"Held up by {named(causes)}. " if causes else ""
    fault = (
        _blamed(causes, first)
        if causes
        else Fault(HUNG, ", ".join(sorted(first)), _actions(first.values()), _node(first))
    )
    return PartFailed(
        f"no call finished for {timeout_s:g} s. Unfinished: {shown}. {blamed}A slow step needs a larger "
        "cluster.step_timeout_s (a slow start a larger cluster.start_timeout_s). Ranks that share a group and began "
        "unequally many collectives in it wait for one another: that is a defect, which cluster.check_collectives=true "
        f"finds where it begins; see logs/{_quoted(seen, causes)}",
        fault,
    )


def _quoted(seen: Mapping[str, Seen], first: Sequence[Seen]) -> str:
    """Lines of what each rank does, those who are to blame first, and of where they stand."""
    named_first = {one.who for one in first}
    order = [*first, *(one for _, one in sorted(seen.items()) if one.who not in named_first)]
    lines = "".join(f"\n  {one.describe()}" for one in order if one.beat is not None or one.stands)
    standing = frames(seen)
    if standing:
        lines += f"\nWhere they stand (whole stacks in logs/*{STACKS_SUFFIX}):{describe(standing)}"
    return lines


def _blamed(causes: Sequence[Seen], calls: Mapping[str, Watched] = MappingProxyType({})) -> Fault:
    """calls: by who, the open ones, which say what processes without a heartbeat do."""
    open_calls = {who: entry.what for who, entry in calls.items()}
    actions = dict.fromkeys(
        one.beat.verb or one.beat.action if one.beat else open_calls.get(one.who, "") for one in causes
    )
    nodes = dict.fromkeys(one.node for one in causes if one.node)
    return Fault(HUNG, ", ".join(one.who for one in causes), ", ".join(actions), ", ".join(nodes))


def _actions(entries: Iterable[Watched]) -> str:
    return ", ".join(dict.fromkeys(entry.what for entry in entries))


def _node(first: Mapping[str, Watched]) -> str:
    return ", ".join(dict.fromkeys(entry.node for entry in first.values() if entry.node))
