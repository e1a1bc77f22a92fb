"""A slow link between the ranks: the experiment again in a network namespace of its own, whose loopback is limited."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

INSIDE = "PLAN_ACCURACY_INSIDE"  # set where the namespace is there
BURST_BYTES, QUEUE_BYTES = 1 << 20, 32 << 20


def run_inside(arguments: Sequence[str]) -> None:
    """Begin the command again in a namespace that ends with it. Does not return, unless it is in there already; ends
    the process where this is not root, or the kernel makes none."""
    if os.environ.get(INSIDE):
        return
    if os.geteuid():
        sys.exit("--mbit needs root: a network namespace of its own is made, so that nothing else is slowed down")
    command = ["unshare", "--net", "--kill-child", sys.executable, "-m", "experiments.plan_accuracy", *arguments]
    os.environ[INSIDE] = "1"
    os.execvp(command[0], command)


def limit(mbit: int) -> None:
    """So many millions of bits a second over this namespace's loopback, which is taken up."""
    bucket = f"rate {mbit}mbit burst {BURST_BYTES} limit {QUEUE_BYTES}"
    for line in ("ip link set lo up", f"tc qdisc replace dev lo root tbf {bucket}"):
        subprocess.run(line.split(), check=True)
