"""The number of cores that this process may use."""

from __future__ import annotations

import os


def count_cores() -> int:
    """Cores of the process's affinity mask where the system has one (Linux), else all of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
