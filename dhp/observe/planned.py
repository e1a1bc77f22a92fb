"""Records what was planned beside what a run takes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from statistics import median
from typing import Any

from dhp.config.devices import known_devices
from dhp.core.reports import DeviceInfo
from dhp.observe.metrics import StepMetrics

WARNED = 0.2  # of the planned step: a larger difference is named
_WARM_UP = 1  # steps that do not count: kernels are made ready, and caches filled
_MOST = 512  # steps whose times are kept

READING, COMPUTING, SENDING, WAITING = (
    "reading data",
    "computing",
    "communication",
    "the driver, hand-overs and waiting",
)


@dataclass(frozen=True)
class Planned:
    """Of a mean step. Unset: not known.

    step_s: seconds. busy_s, comm_s: of them, by stage, as metrics.jsonl has them. bubble: share of the devices' time
    without work. tokens: of all replicas.

    memory_bytes: of the fullest rank of each stage, memory_kinds: of these, by what they are for; activation_bytes:
    what forward keeps for backward.

    kinds: seconds by kind of work. source: of the constants."""

    step_s: float | None = None
    busy_s: Mapping[str, float] = field(default_factory=dict)
    comm_s: Mapping[str, float] = field(default_factory=dict)
    bubble: float | None = None
    tokens: float | None = None
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    activation_bytes: Mapping[str, float] = field(default_factory=dict)
    memory_kinds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    kinds: Mapping[str, float] = field(default_factory=dict)
    source: str = ""


class PlanVersusRun:
    """A plan and the steps so far."""

    def __init__(self, planned: Planned):
        self.planned = planned
        self._steps: list[tuple[float, float]] = []
        self._busy: dict[str, list[float]] = {}
        self._comm: dict[str, list[float]] = {}
        self._most: dict[str, dict[str, int]] = {"memory_bytes": {}, "activation_bytes": {}}
        self._seen = 0

    def add(self, metrics: StepMetrics) -> None:
        """A step has ended."""
        self._seen += 1
        for name, most in self._most.items():
            for stage, count in (getattr(metrics, name) or {}).items():
                most[stage] = max(most.get(stage, 0), count)
        if self._seen <= _WARM_UP or metrics.step_s is None or len(self._steps) == _MOST:
            return
        self._steps.append((metrics.step_s, metrics.data_s or 0.0))
        for known, found in ((self._busy, metrics.busy_s), (self._comm, metrics.comm_s)):
            for stage, seconds in (found or {}).items():
                known.setdefault(stage, []).append(seconds)

    @property
    def step_s(self) -> float | None:
        """Median of the steps that count; None before any."""
        return median(seconds for seconds, _ in self._steps) if self._steps else None

    @property
    def ratio(self) -> float | None:
        """Measured over planned seconds of a step."""
        measured, planned = self.step_s, self.planned.step_s
        return None if measured is None or not planned else measured / planned

    def measured(self) -> dict[str, Any]:
        """The same keys as `Planned` has, as far as they are measured."""
        busy, comm = ({stage: median(of) for stage, of in known.items()} for known in (self._busy, self._comm))
        return {
            "step_s": self.step_s,
            "data_s": median(data for _, data in self._steps) if self._steps else None,
            "busy_s": busy,
            "comm_s": comm,
            **{name: dict(most) for name, most in self._most.items()},
        }

    def differences(self) -> dict[str, float]:
        """Seconds of a step that were measured beyond the planned ones, by kind of cost and stage."""
        measured, planned = self.measured(), self.planned
        if self.step_s is None or planned.step_s is None:
            return {}
        found = {READING: measured["data_s"] or 0.0}
        busy, comm = measured["busy_s"], measured["comm_s"]
        for stage, seconds in busy.items():
            sent, expected = comm.get(stage, 0.0), planned.comm_s.get(stage, 0.0)
            if comm:
                found[f"{SENDING} of {stage}"] = sent - expected
                found[f"{COMPUTING} of {stage}"] = seconds - sent - (planned.busy_s.get(stage, 0.0) - expected)
            else:
                found[f"{COMPUTING} of {stage}"] = seconds - planned.busy_s.get(stage, 0.0)
        apart = sum(busy.values()) > self.step_s * 1.02  # stages that work at the same time
        joined = max if apart else sum
        left = self.step_s - (measured["data_s"] or 0.0) - joined(busy.values())
        return {**found, WAITING: left - (planned.step_s - joined(planned.busy_s.values()))} if busy else found

    def differing(self) -> str | None:
        """The kind of cost that differs most in the direction in which the step does; None where the step is as
        planned within `WARNED`, or nothing is known."""
        ratio, found = self.ratio, self.differences()
        if ratio is None or not found or abs(ratio - 1) <= WARNED:
            return None
        return (max if ratio > 1 else min)(found, key=lambda kind: found[kind])

    def summary(self) -> dict[str, Any]:
        """Fields of the run's summary; none where nothing was planned."""
        if self.planned.step_s is None:
            return {}
        planned = asdict(self.planned)
        return {
            "planned": planned,
            "measured": self.measured(),
            "planned_ratio": self.ratio,
            "differs": self.differing(),
        }

    def line(self) -> str | None:
        """`0.21 s a step, took 0.25 (+19%)`; None where nothing was planned or measured."""
        planned, measured, ratio = self.planned.step_s, self.step_s, self.ratio
        if planned is None or measured is None or ratio is None:
            return None
        found = f"{planned:.3g} s a step, took {measured:.3g} ({ratio - 1:+.0%})"
        differing = self.differing()
        return found if differing is None else f"{found}: most by {differing}"


@cache
def known_peaks() -> dict[tuple[str, str], float]:
    """Operations a second by device name and number format, as vendors state them."""
    return {
        (name, number_format): peak.value
        for device in known_devices().values()
        for name in device.names
        for number_format, peak in device.peaks.items()
    }


def who_measures(devices: Sequence[DeviceInfo]) -> list[bool]:
    """Which ranks measure: the first on each machine whose CPUs compute, since others would disturb it."""
    ids = [device.device_id for device in devices]
    return [device.kind == "cpu" and ids.index(device.device_id) == n for n, device in enumerate(devices)]


def peak_flops(devices: Sequence[DeviceInfo]) -> float | None:
    """Operations a second of the devices of all ranks together, each counted once, in the fastest format that is used
    on it; None when one of them is not known."""
    fastest: dict[str, float] = {}
    for device in devices:
        peak = _peak(device)
        if peak is not None:
            fastest[device.device_id] = max(peak, fastest.get(device.device_id, 0.0))
    return sum(fastest.values()) if {device.device_id for device in devices} == set(fastest) else None


def unknown_devices(devices: Sequence[DeviceInfo]) -> list[str]:
    """Devices whose peak is not known, with the format that they compute in."""
    known = {device.device_id for device in devices if _peak(device) is not None}
    return sorted({f"{device.name} in {device.format}" for device in devices if device.device_id not in known})


def utilisation(flops: Mapping[str, float], step_s: float, peak: float | None) -> float | None:
    """Useful operations of all parts / those that the devices could do in the time of the step; None where their peak
    is not known, or was measured too low, so that the share would be above 1."""
    share = None if peak is None else sum(flops.values()) / (step_s * peak)
    return None if share is None or share > 1 else share


def _peak(device: DeviceInfo) -> float | None:
    return device.measured if device.kind == "cpu" else known_peaks().get((device.name, device.format))
