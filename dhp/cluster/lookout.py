"""The driver's view of all processes of its run, on every node, which no actor's queue delays."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dhp.cluster.heartbeat import Beat
from dhp.cluster.node_watch import SILENT, NodeWatch, Sight, look
from dhp.cluster.post import Post
from dhp.cluster.stacks import SUFFIX
from dhp.cluster.stall import Seen, Stall, find_stall

EVERY_S = 5.0  # between two looks while no call ends
ANSWER_S = 5.0  # for a node to answer, with stacks too


class Lookout:
    """One run's. Where Ray is on several nodes, an actor on each but the driver's looks at the processes there."""

    def __init__(self, collective_s: float, log_dir: str | None, own_node: str, names: Mapping[str, str]):
        """collective_s: the longest that a collective may hold a rank. own_node: Ray's id of this process's node.
        names: of nodes, by Ray's id, for messages; none where all is on this machine."""
        self.collective_s, self._log_dir, self._own_node, self._names = collective_s, log_dir, own_node, names
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
            path = Path(self._log_dir) / f"{sight.post.name}{SUFFIX}"
            if sight.stacks and str(path) != sight.post.stacks:
                with suppress(OSError):  # the message quotes them all the same
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
                    with os.fdopen(os.open(path, flags, 0o644), "a") as file:
                        file.write(sight.stacks)
