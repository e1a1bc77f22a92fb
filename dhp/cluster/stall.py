"""Who holds up a collective: decided from what all ranks were seen to do, by no call of theirs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dhp.cluster.heartbeat import Beat
from dhp.cluster.node_watch import GONE, STOPPED, Sight
from dhp.cluster.stacks import Frame, odd_ones, working


@dataclass(frozen=True)
class Seen:
    """A process as the driver knows it. who: `text rank 1`. node: as a person knows it; "": the run's own machine."""

    who: str
    node: str
    sight: Sight

    def __str__(self) -> str:
        return f"{self.who} on node {self.node}" if self.node else self.who

    @property
    def beat(self) -> Beat | None:
        return self.sight.beat

    @property
    def stands(self) -> bool:
        """Whether it is stopped, or gone: it does nothing."""
        return self.sight.state in (STOPPED, GONE)

    @property
    def held_s(self) -> float | None:
        """How long a collective has held it; None: none does."""
        return None if self.beat is None or self.stands else self.beat.held_s

    def describe(self) -> str:
        """What it does, and how to wake it where it is stopped."""
        doing = "runs" if self.beat is None else str(self.beat)
        before = "" if self.beat is None else f"; before that {doing}"
        if self.sight.state == GONE:
            return f"{self}: its process is gone{before}"
        if self.sight.state == STOPPED:
            pid = self.sight.post.pid
            return f"{self}: is stopped (SIGSTOP or a debugger; `kill -CONT {pid}` lets it go on){before}"
        return f"{self}: {doing}"


@dataclass(frozen=True)
class Stall:
    """A collective that not all ranks of its group have entered. waiting: a rank inside of it, the one that waits
    longest. missing: those that are not; none: every rank of the group is in a collective of it, not in the same one.
    causes: those that hold these up."""

    waiting: Seen
    missing: Sequence[Seen]
    causes: Sequence[Seen]


def find_stall(seen: Mapping[str, Seen], limit_s: float) -> Stall | None:
    """The collective that has held a rank longest, where it has for more than `limit_s`; None: there is none. Only in
    methods of the engine: while a stage is loaded, its own limit holds. seen: by `who`."""
    held = [one for one in seen.values() if one.held_s is not None and one.beat and one.beat.verb]
    for one in sorted(held, key=lambda one: -(one.held_s or 0.0)):
        assert one.beat is not None and one.held_s is not None
        if one.held_s <= limit_s:
            break
        missing = _missing(one, seen)
        if missing or not one.beat.device:  # on a GPU nothing says that it waits but that others have not begun
            return Stall(one, missing, _causes(missing, seen))
    return None


def _missing(waiting: Seen, seen: Mapping[str, Seen]) -> list[Seen]:
    """Of the group that a rank waits in, those that have begun fewer collectives; where all have begun as many, as in
    an exchange by messages, those that no collective holds."""
    beat = waiting.beat
    assert beat is not None
    stage = waiting.who.rpartition(" rank ")[0]
    others = [seen[who] for rank in beat.members if (who := f"{stage} rank {rank}") in seen and who != waiting.who]
    own = beat.counts.get(beat.group, 0)
    behind = [one for one in others if one.beat is None or one.beat.counts.get(beat.group, 0) < own]
    if behind or beat.device:
        return behind
    return [one for one in others if one.held_s is None]


def _causes(missing: Sequence[Seen], seen: Mapping[str, Seen]) -> list[Seen]:
    """Whom the missing ones wait for themselves, in other collectives or for their next call; or they themselves."""
    causes: dict[str, Seen] = {}
    idle: list[Seen] = []
    left, known = list(missing), {one.who: one for one in missing}
    while left:
        one = left.pop(0)
        if one.held_s is not None:
            more = [other for other in _missing(one, seen) if other.who not in known]
            left, known = left + more, known | {other.who: other for other in more}
        elif one.beat is not None and not one.beat.verb and not one.stands:
            idle.append(one)
        else:
            causes[one.who] = one
    if idle and not causes:  # their next call waits for the results of a rank that computes
        causes = {one.who: one for one in seen.values() if one.stands or _computes(one)} or {o.who: o for o in idle}
    return [*(causes or known).values()]  # all of them wait for one another


def _computes(one: Seen) -> bool:
    return one.beat is not None and bool(one.beat.verb) and one.held_s is None


def suspects(seen: Mapping[str, Seen], waiting: Collection[str]) -> list[Seen]:
    """Where nothing has moved: those that do nothing, or whom a collective waits for, or that stand elsewhere than the
    others of their part; none: not known. waiting: who have calls that are open."""
    standing = [one for one in seen.values() if one.stands]
    if standing:
        return standing
    stall = find_stall(seen, 0.0)
    if stall is not None and stall.causes:
        return list(stall.causes)
    by_name = {one.sight.post.name: one for one in seen.values() if one.who in waiting}
    return [by_name[name] for name in odd_ones({n: f for n, f in frames(seen).items() if n in by_name})]


def frames(seen: Mapping[str, Seen]) -> dict[str, tuple[Frame, ...]]:
    """By name, where those are that answered."""
    found = {one.sight.post.name: working(one.sight.stacks) for one in seen.values()}
    return {name: stack for name, stack in found.items() if stack}


def named(some: Iterable[Seen]) -> str:
    """`text rank 1 on node 10.0.0.5, text rank 3`."""
    return ", ".join(map(str, some))
