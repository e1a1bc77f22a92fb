"""Writes summary.json: outcome, plan beside it, reading."""

from __future__ import annotations

import json
import math
import platform
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, Literal

from dhp.config.devices import known_peaks
from dhp.core.files import write_whole
from dhp.core.reports import DeviceInfo
from dhp.core.text import json_safe
from dhp.observe.metrics import StepMetrics
from dhp.version import VERSION

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


STALL_WINDOW = 20  # steps that are looked at together
TOLERATED_WAIT = 0.02  # of the step time may be spent waiting for data
SPARE_SPEED = 1.1  # times the mean: reading should be so much faster, because steps differ


class DataStall:
    """One run's waits for data. workers, prefetch: data.num_workers, and the steps that are read ahead.

    windows: samples are measured while the run goes on."""

    def __init__(self, workers: int, prefetch: int, windows: bool = False) -> None:
        self._workers, self._prefetch, self._windows = workers, prefetch, windows
        self._steps: deque[tuple[float, float, float, float]] = deque(maxlen=STALL_WINDOW)
        self._seen = 0
        self._next = STALL_WINDOW + 1  # the first step waits for its data however fast reading is

    def add(self, step_s: float, data_s: float, read_s: float, measure_s: float) -> str | None:
        """A step has ended. A message for the user, now and then, while more than 2% of the time goes into waiting.

        step_s: seconds of the step. data_s: seconds of them spent waiting for data. read_s: seconds that one process
        spent reading it. measure_s: seconds that the dataset actor spent choosing its samples."""
        self._seen += 1
        self._steps.append((step_s, data_s, read_s, measure_s))
        if self._seen < self._next:
            return None
        steps, waits, reads, measuring = map(sum, zip(*self._steps, strict=True))
        if waits <= TOLERATED_WAIT * steps:
            return None
        self._next = 2 * self._seen
        share = f"{waits / steps:.0%} of the last {STALL_WINDOW} steps' time went into waiting for data"
        if self._windows and measuring > steps - waits:
            return (
                f"{share}: one process measures the samples of each window (data.balance_window) and takes longer than "
                "the steps do. `python -m dhp inspect data` measures all of them once; runs find them in data.cache_dir"
            )
        if not self._workers:
            reads += measuring  # the same process
        # Processes that read as fast as training goes, itself without the waits.
        needed = ceil(SPARE_SPEED * reads / max(steps - waits, 1e-9))
        if needed > max(1, self._workers):
            return f"{share}; data.num_workers={needed} would keep up"
        more = 2 * self._prefetch + 2
        return f"{share}, though reading is fast enough in the mean: steps differ, so set data.prefetch={more}"


class StepTotals:
    """What a summary needs of a run's steps, in some bytes a step: a run may have millions."""

    def __init__(self, steps: Iterable[StepMetrics] = ()) -> None:
        self.last: int | None = None
        self.skipped, self.tokens = 0, 0
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self._seconds = array("d")
        self._busy_seconds = array("d")  # of steps whose busy_s is known
        self._busy: dict[str, array[float]] = {}
        self._stages: tuple[str, ...] = ()  # of the last of these
        for step in steps:
            self.add(step)

    def add(self, step: StepMetrics) -> None:
        """A step has ended."""
        self.last, self.skipped = step.step, step.skipped_steps or 0
        if step.loss is not None:
            self.first_loss, self.last_loss = step.loss if self.first_loss is None else self.first_loss, step.loss
        if step.step_s is not None:
            self._seconds.append(step.step_s)
            self.tokens += step.tokens or 0
        if step.busy_s and step.step_s is not None:
            self._busy_seconds.append(step.step_s)
            self._stages = tuple(step.busy_s)
            for stage, seconds in step.busy_s.items():
                self._busy.setdefault(stage, array("d")).append(seconds)

    @property
    def median_step_s(self) -> float | None:
        """None: no step was timed."""
        return median(self._seconds) if self._seconds else None

    @property
    def tokens_per_s(self) -> float | None:
        """Of the steps that were timed."""
        seconds = math.fsum(self._seconds)
        return self.tokens / seconds if seconds else None

    @property
    def idle_share(self) -> dict[str, float] | None:
        """Of each stage."""
        seconds = math.fsum(self._busy_seconds)
        return {name: 1 - math.fsum(self._busy[name]) / seconds for name in self._stages} if seconds else None


_PACKAGES = ("torch", "transformers", "ray", "deepspeed")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide a run's numbers; None for one that is not installed."""
    own = {"python": platform.python_version(), "dhp": VERSION}  # dhp runs from a checkout as well as installed
    return own | {package: _version(package) for package in _PACKAGES}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The outcome of a run, in figures. Each field's string says its unit and when it is null, as in `StepMetrics`."""

    status: Literal["completed", "failed", "interrupted"]
    """How the run ended: `completed`, `failed` or `interrupted` (Ctrl-C, SIGTERM). Unit: a word."""
    error: str | None = None
    """What a failed run failed of. Unit: text. Null: it did not fail."""
    steps: int = 0
    """Optimizer steps done, those before a resume included. Unit: steps."""
    resumed_from: str | None = None
    """Checkpoint that the run continued. Unit: a path. Null: it began at step 1."""
    restarts: int = 0
    """Times the run was started again after a fault, by training.max_restarts. Unit: times."""
    skipped_steps: int = 0
    """Of these, steps that updated nothing because loss or gradient was not finite. Unit: steps."""
    first_loss: float | None = None
    """Loss of the first step. Unit: nats a token. Null: no step was done."""
    last_loss: float | None = None
    """Loss of the last step. Unit: nats a token. Null: no step was done."""
    eval_loss: Mapping[str, float | None] | None = None
    """Loss of the last evaluation, by dataset, and of `all` of several together. Unit: nats a token. Null: nothing was
    evaluated."""
    eval_accuracy: Mapping[str, float | None] | None = None
    """Share of the target tokens that were the likeliest ones in it, by the same names. Unit: a share of 1. Null:
    nothing was evaluated."""
    eval_exact: Mapping[str, float | None] | None = None
    """Share of the samples all of whose target tokens were, by the same names. Unit: a share of 1. Null: nothing was
    evaluated."""
    median_step_s: float | None = None
    """Median of step_s over all steps. Unit: seconds. Null: no step was done."""
    tokens_per_s: float | None = None
    """All tokens / the wall time of all steps. Unit: tokens a second. Null: no step was done."""
    idle_share: Mapping[str, float] | None = None
    """1 - busy_s / step_s, both summed over all steps, by stage. Parts that take turns on the same devices are idle
    while the other works. Unit: a share of 1. Null: no step was done."""
    world: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Actors and degrees, by part. Unit: counts."""
    planned: Mapping[str, Any] | None = None
    """What the run was expected to take: `step_s`, by stage `busy_s`, `comm_s`, `memory_bytes`, `memory_kinds` and
    `activation_bytes`, `bubble`, seconds by kind of work (`kinds`), where the constants are from (`source`). Unit: as
    in metrics.jsonl. Null: nothing is known of the devices; a CPU's rates are measured by `python -m dhp plan
    --measure`."""
    measured: Mapping[str, Any] | None = None
    """The same keys as they were: medians of seconds, the most of bytes. Unit: as in metrics.jsonl. Null: nothing was
    planned."""
    planned_ratio: float | None = None
    """Median step_s / planned step_s. Unit: a factor. Null: nothing was planned, or no step counts (the first does
    not)."""
    differs: str | None = None
    """Where that is above 1.2 or below 0.8, the kind of cost that differs most. Unit: words. Null: it is not, or
    nothing was planned."""
    stragglers: Sequence[str] = ()
    """Ranks that computed for more than 1.2 times as long as the median of their peers, for as much work, in 50 steps
    in a row; empty on GPUs, where that is not measured. Unit: names of ranks."""
    versions: Mapping[str, str | None] = field(default_factory=versions)
    """Of Python, of dhp and of the packages that decide a run's numbers; null for one that is not installed. Unit:
    text."""

    @classmethod
    def of(cls, steps: Sequence[StepMetrics] | StepTotals, done: int = 0, **known: Any) -> Summary:
        """The summary of these steps; `known` gives the other fields (status, world, error …).

        done: steps before them, in a run that another one began."""
        found = steps if isinstance(steps, StepTotals) else StepTotals(steps)
        return cls(
            steps=done if found.last is None else found.last,
            skipped_steps=found.skipped,
            first_loss=found.first_loss,
            last_loss=found.last_loss,
            median_step_s=found.median_step_s,
            tokens_per_s=found.tokens_per_s,
            idle_share=found.idle_share,
            **known,
        )

    def figures(self) -> dict[str, Any]:
        """Figures of the steps: losses, times, idle shares."""
        names = ("first_loss", "last_loss", "median_step_s", "tokens_per_s", "idle_share")
        return {name: getattr(self, name) for name in names}


def write_summary(run_dir: str | Path, summary: Summary) -> Path:
    """Write `<run_dir>/summary.json` whole or not at all, and return its path. Numbers as in metrics.jsonl."""
    path = Path(run_dir) / "summary.json"
    write_whole(path, json.dumps(json_safe(asdict(summary)), indent=2, allow_nan=False) + "\n")
    return path


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
