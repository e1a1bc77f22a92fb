"""The cores that this process may run on."""

from __future__ import annotations

import os


def count_cores() -> int:
    """How many: those that the system lets it run on, where it says (Linux), else all of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
