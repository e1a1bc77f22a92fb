"""Growth of processes, from looks at them from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MIB = 1 << 20
TENTHS = 10
READERS = {"_Reader": "reader", "data": "reader"}
OF_RAY = ("IDLE", "DashboardAgent", "RuntimeEnvAgent")


@dataclass(frozen=True)
class Sample:
    """A process at a step: its kind, and its resident bytes that it shares with no other."""

    pid: int
    kind: str
    step: int
    own_bytes: int


def kind_of(line: Sequence[str]) -> str:
    """What a process of a run is, by its command line: `raylet`, `gcs_server`, `reader`, `rank`. An actor says what it
    does just now."""
    first = line[0] if line else ""
    if first.startswith("ray::"):
        name = first.removeprefix("ray::").split(".")[0].split()[0].rstrip(":")
        return READERS.get(name, name if name in OF_RAY else "rank")
    script = next((one for one in line[1:3] if one.endswith(".py")), first)
    return os.path.basename(script)


def growth(samples: Sequence[Sample], warm: int) -> Iterator[dict[str, Any]]:
    """A row for each kind of process: of the one that grows most, the slope of a line through its samples behind the
    first `warm` steps, by least squares. Kinds that do not live to the end are left out."""
    last = max((sample.step for sample in samples), default=0)
    of_process: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.step >= warm:
            of_process.setdefault(sample.pid, []).append(sample)
    of_kind: dict[str, dict[int, list[Sample]]] = {}
    for pid, own in of_process.items():
        of_kind.setdefault(own[-1].kind, {})[pid] = own
    for kind, processes in sorted(of_kind.items()):
        lived = [own for own in processes.values() if own[-1].step >= 0.9 * last and own[-1].step > own[0].step]
        if not lived:
            continue
        slopes = [slope(own) for own in lived]
        worst = lived[int(np.argmax(slopes))]
        yield {
            "process": kind,
            "count": len(lived),
            "steps": last,
            "warm_steps": warm,
            "warm_mib": round(worst[0].own_bytes / MIB, 1),
            "end_mib": round(worst[-1].own_bytes / MIB, 1),
            "growth_bytes_a_step": round(max(slopes)),
            "floor_bytes_a_step": round(max(map(floor_slope, lived))),
        }


def floor_slope(samples: Sequence[Sample]) -> float:
    """Bytes a step of a line through the least of each tenth of the samples: what comes and goes, as buffers of
    pictures, is left out, what stays is not."""
    tenths = np.array_split(np.arange(len(samples)), min(TENTHS, len(samples)))
    least = [min((samples[at] for at in tenth), key=lambda sample: sample.own_bytes) for tenth in tenths]
    return slope(least)


def slope(samples: Sequence[Sample]) -> float:
    """Bytes a step."""
    steps, values = [sample.step for sample in samples], [sample.own_bytes for sample in samples]
    return float(np.polyfit(steps, values, 1)[0])
