"""Watches all processes; decides who holds up a collective."""

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dhp.cluster.hangs.vitals import SAVING, STACKS_SUFFIX, Beat, Frame, Post, odd_ones, read_beat, take_stacks, working
from dhp.cluster.servers import has_ended, is_stopped

RUNS, STOPPED, GONE, SILENT = "runs", "stopped", "gone", "does not answer"
MOST_BYTES = 1 << 16  # of a process's stacks


@dataclass(frozen=True)
class Sight:
    """A process as it was seen. state: RUNS, STOPPED (by a signal or a debugger) or GONE; SILENT: its node gave no
    answer, and the rest is of the last one. beat: of a rank that has begun to keep one. stacks: of its threads, as
    text; "": it was not asked, or did not answer."""

    post: Post
    state: str
    beat: Beat | None = None
    stacks: str = ""


def look(posts: Sequence[Post], stacks: bool) -> list[Sight]:
    """Processes of this machine. stacks: each is asked for its stacks, which takes up to some seconds where one does
    not answer."""
    dumps = take_stacks(posts) if stacks else {}
    return [
        Sight(
            post, _state(post), read_beat(post.heartbeat) if post.heartbeat else None, dumps.get(post, "")[:MOST_BYTES]
        )
        for post in posts
    ]


def _state(post: Post) -> str:
    process = post.process()
    return GONE if process is None or has_ended(process) else STOPPED if is_stopped(process) else RUNS


class NodeWatch:
    """The actor that looks on a node other than the driver's."""

    def look(self, posts: Sequence[Post], stacks: bool) -> list[Sight]:
        """See `dhp.cluster.hangs.lookout.look`."""
        return look(posts, stacks)


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


EVERY_S = 5.0  # between two looks while no call ends
ANSWER_S = 5.0  # for a node to answer, with stacks too


class Lookout:
    """One run's. Where Ray is on several nodes, an actor on each but the driver's looks at the processes there."""

    def __init__(self, collective_s: float, log_dir: str | None, this_node: str, names: Mapping[str, str]):
        """collective_s: the longest that a collective may hold a rank. this_node: Ray's id of this process's node.
        names: of nodes, by Ray's id, for messages; none where all is on this machine."""
        self.collective_s, self._log_dir, self._own_node, self._names = collective_s, log_dir, this_node, names
        self._asked: list[tuple[str, Any]] = []  # who, and the ref of its Post
        self._posts: list[tuple[str, Post]] = []
        self._watches: dict[str, Any] = {}  # by node
        self._beats: dict[Post, tuple[float, Beat]] = {}  # when they were read last, and what they said
        self._looked = 0.0

    def add(self, who: str, post: Any) -> None:
        """An actor was created. post: the ref of its `Post`."""
        self._asked.append((who, post))

    def node_name(self, node: str) -> str:
        """As a person knows it; "" where all is on this machine."""
        return self._names.get(node, "")

    def watch(self) -> Stall | None:
        """A collective that has held a rank for too long. Looks every `EVERY_S`, however often it is called."""
        now = time.monotonic()
        if now - self._looked < min(EVERY_S, self.collective_s / 4):
            return None
        found = find_stall(self.look(), self.collective_s)
        self._looked = time.monotonic()
        return found

    def look(self, stacks: bool = False) -> dict[str, Seen]:
        """All processes that have begun, by `who`; those of a node that does not answer are SILENT. stacks: with where
        they stand, which logs/ then has too."""
        self._find_posts()
        by_node: dict[str, list[Post]] = {}
        for _, post in self._posts:
            by_node.setdefault(post.node, []).append(post)
        own = by_node.pop(self._own_node, [])
        asked = {node: self._ask(node, posts, stacks) for node, posts in by_node.items()}
        sights = look(own, stacks)
        deadline = time.monotonic() + ANSWER_S
        for node, ref in asked.items():
            sights += self._answer(node, ref, deadline) or [self._silent(post) for post in by_node[node]]
        now = time.monotonic()
        self._beats |= {one.post: (now, one.beat) for one in sights if one.beat is not None and one.state != SILENT}
        if stacks:
            self._keep(sights)
        return self._name(sights)

    def _name(self, sights: Sequence[Sight]) -> dict[str, Seen]:
        found: dict[str, Seen] = {}
        by_post = {sight.post: sight for sight in sights}
        for who, post in self._posts:
            if post in by_post:
                key = (
                    who if who not in found else f"{who} (process {post.pid})"
                )  # that of an evaluation has the name too
                found[key] = Seen(key, self.node_name(post.node), by_post[post])
        return found

    def stop(self) -> None:
        """End the actors that look on other nodes."""
        for watch in self._watches.values():
            ray.kill(watch, no_restart=True)
        self._watches = {}

    def _find_posts(self) -> None:
        waiting, self._asked = self._asked, []
        for who, ref in waiting:
            if not ray.wait([ref], timeout=0)[0]:
                self._asked.append((who, ref))
                continue
            with suppress(RayError):  # its death is reported by the call that waits for it
                self._posts.append((who, ray.get(ref, timeout=0)))

    def _ask(self, node: str, posts: Sequence[Post], stacks: bool) -> Any:
        if node not in self._watches:
            at = NodeAffinitySchedulingStrategy(node, soft=False)
            options = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": at}
            self._watches[node] = ray.remote(NodeWatch).options(**options).remote()
        return self._watches[node].look.remote(posts, stacks)

    def _answer(self, node: str, ref: Any, deadline: float) -> list[Sight]:
        try:
            found: list[Sight] = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
            return found
        except GetTimeoutError:  # it is being started, or its node is slow
            return []
        except RayError:  # it died: the next look makes another one
            self._watches.pop(node, None)
            return []

    def _silent(self, post: Post) -> Sight:
        """With its last beat, as if it had done the same since."""
        if post not in self._beats:
            return Sight(post, SILENT)
        read, beat = self._beats[post]
        since = time.monotonic() - read
        times = {key: getattr(beat, key) for key in ("verb_s", "held_s", "saved_s")}
        later = {key: value + since for key, value in times.items() if value is not None}
        return Sight(post, SILENT, replace(beat, **later))

    def _keep(self, sights: Sequence[Sight]) -> None:
        """Stacks of processes that do not see the run's logs go there from here."""
        if self._log_dir is None:
            return
        for sight in sights:
            path = Path(self._log_dir) / f"{sight.post.name}{STACKS_SUFFIX}"
            if sight.stacks and str(path) != sight.post.stacks:
                with suppress(OSError):  # the message quotes them all the same
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
                    with os.fdopen(os.open(path, flags, 0o644), "a") as file:
                        file.write(sight.stacks)
