"""Processes of actors as the driver looks at them, made up."""

import psutil

from dhp.cluster.hangs.lookout import RUNS, Seen, Sight
from dhp.cluster.hangs.vitals import Beat, Post


def post_of(pid: int, name: str, stacks: str = "/missing", heartbeat: str = "", node: str = "here") -> Post:
    """Of a process that there is."""
    return Post(name, node, pid, psutil.Process(pid).create_time(), stacks, heartbeat)


def seen(who: str, beat: Beat | None, state: str = RUNS, node: str = "", stacks: str = "") -> Seen:
    """A rank that does what the heartbeat says; of no real process."""
    name = who.replace(" rank ", "-")
    return Seen(who, node, Sight(Post(name, node, 77, 0.0, "/missing"), state, beat, stacks))
