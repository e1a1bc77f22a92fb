"""Who holds up a collective: decided from what all ranks were seen to do, by no call of theirs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dhp.cluster.heartbeat import SAVING, Beat
from dhp.cluster.node_watch import GONE, SILENT, STOPPED, Sight
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
        """Whether it is stopped or gone, or its node does not answer: nothing says that it does anything."""
        return self.sight.state in (STOPPED, GONE, SILENT)

    @property
    def silent(self) -> bool:
        """Whether its node does not answer."""
        return self.sight.state == SILENT

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
        if self.silent:
            return f"{self}: its node does not answer (is it down, or cut off?){before}"
        return f"{self}: {doing}"


@dataclass(frozen=True)
class Stall:
    """A collective that not all ranks of its group have entered, or on GPUs one that does not end. waiting: a rank
    inside of it, the one that waits longest. missing: those that are not; none: every rank of the group is in a
    collective of it, on CPUs not in the same one. causes: those that hold these up."""

    waiting: Seen
    missing: Sequence[Seen]
    causes: Sequence[Seen]

    @property
    def silent(self) -> bool:
        """Whether a rank of a node that does not answer is missing."""
        return any(one.silent for one in self.missing)


def find_stall(seen: Mapping[str, Seen], limit_s: float) -> Stall | None:
    """The collective that has held a rank longest, where it has for more than `limit_s`; None: there is none. Only in
    methods of the engine: while a stage is loaded, its own limit holds; and so it does while a rank that is waited for
    writes a checkpoint, whose end the limit counts from. seen: by `who`."""
    stalls = _stalls(seen, limit_s)
    return next((one for one in stalls if not any(_has_saved(o, limit_s) for o in (*one.missing, *one.causes))), None)


def _has_saved(one: Seen, limit_s: float) -> bool:
    """Whether it writes a checkpoint, or has until less than `limit_s` ago. Not one that is stopped or gone."""
    if one.beat is None or (one.stands and not one.silent):
        return False
    return one.beat.verb in SAVING or (one.beat.saved_s is not None and one.beat.saved_s <= limit_s)


def _stalls(seen: Mapping[str, Seen], limit_s: float) -> Iterator[Stall]:
    """Those in which a rank has been for more than `limit_s`, the longest first; then, on GPUs, those that nobody is
    missing in."""
    held = [one for one in seen.values() if one.beat and one.beat.verb and (one.held_s or 0.0) > limit_s]
    complete, inside = [], {one.who for one in held}
    for one in sorted(held, key=lambda one: -(one.held_s or 0.0)):
        assert one.beat is not None
        missing = _missing(one, seen)
        if missing or not one.beat.device:
            yield Stall(one, missing, _causes(missing, seen))
        elif (peers := _peers(one, seen)) and inside.issuperset(peer.who for peer in peers):
            complete.append(Stall(one, (), ()))
    yield from complete


def _peers(waiting: Seen, seen: Mapping[str, Seen]) -> list[Seen]:
    """The other ranks of the group that a rank waits in."""
    stage, members = waiting.who.rpartition(" rank ")[0], () if waiting.beat is None else waiting.beat.members
    return [seen[who] for rank in members if (who := f"{stage} rank {rank}") in seen and who != waiting.who]


def _missing(waiting: Seen, seen: Mapping[str, Seen]) -> list[Seen]:
    """Of the group that a rank waits in, those of nodes that do not answer, and those that have begun fewer
    collectives; where all have begun as many, as in an exchange by messages, those that no collective holds."""
    beat = waiting.beat
    assert beat is not None
    others = _peers(waiting, seen)
    own = beat.counts.get(beat.group, 0)
    behind = [one for one in others if one.beat is None or one.beat.counts.get(beat.group, 0) < own]
    silent = [one for one in others if one.silent]
    if silent:
        return [*silent, *(one for one in behind if not one.silent)]
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
    stall = next(_stalls(seen, 0.0), None)
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
