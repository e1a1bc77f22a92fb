"""The cores that this process may run on."""

from __future__ import annotations

import os


def count_cores() -> int:
    """How many: those of a container or a job's share where the system says, else all of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
