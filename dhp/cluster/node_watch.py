"""Looks at the processes of a run's actors on one node, from outside: they need not answer for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dhp.cluster.heartbeat import Beat, read_beat
from dhp.cluster.post import Post
from dhp.cluster.processes import has_ended, is_stopped
from dhp.cluster.stacks import take_stacks

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
            post,
            _state(post),
            read_beat(post.heartbeat) if post.heartbeat else None,
            dumps.get(post, "")[:MOST_BYTES],
        )
        for post in posts
    ]


def _state(post: Post) -> str:
    process = post.process()
    return GONE if process is None or has_ended(process) else STOPPED if is_stopped(process) else RUNS


class NodeWatch:
    """The actor that looks on a node other than the driver's."""

    def look(self, posts: Sequence[Post], stacks: bool) -> list[Sight]:
        """See `dhp.cluster.node_watch.look`."""
        return look(posts, stacks)
