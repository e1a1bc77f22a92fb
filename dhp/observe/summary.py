"""The outcome of a run in one JSON object, summary.json: written at its end, however it ends."""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Literal

from dhp.base.files import write_whole
from dhp.observe.metrics import StepMetrics
from dhp.observe.numbers import json_safe
from dhp.version import VERSION

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
    """Times the actors were built anew after a failure; nothing does that yet. Unit: times."""
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
    median_step_s: float | None = None
    """Median of step_s over all steps. Unit: seconds. Null: no step was done."""
    tokens_per_s: float | None = None
    """All tokens / the wall time of all steps. Unit: tokens a second. Null: no step was done."""
    idle_share: Mapping[str, float] | None = None
    """1 - busy_s / step_s, both summed over all steps, by stage. Parts that take turns on the same devices are idle
    while the other works. Unit: a share of 1. Null: no step was done."""
    world: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Actors and degrees, by part. Unit: counts."""
    versions: Mapping[str, str | None] = field(default_factory=versions)
    """Of Python, of dhp and of the packages that decide a run's numbers; null for one that is not installed. Unit:
    text."""

    @classmethod
    def of(cls, steps: Sequence[StepMetrics], done: int = 0, **known: Any) -> "Summary":
        """The summary of these steps; `known` gives the other fields (status, world, error …).

        done: steps before them, in a run that another one began.
        """
        losses = [step.loss for step in steps if step.loss is not None]
        timed = [step for step in steps if step.step_s is not None]
        seconds = math.fsum(step.step_s for step in timed)
        return cls(
            steps=steps[-1].step if steps else done,
            first_loss=losses[0] if losses else None,
            last_loss=losses[-1] if losses else None,
            median_step_s=median(step.step_s for step in timed) if timed else None,
            tokens_per_s=sum(step.tokens or 0 for step in timed) / seconds if seconds else None,
            idle_share=_idle_share(timed),
            **known,
        )

    def figures(self) -> dict[str, Any]:
        """Figures of the steps: losses, times, idle shares."""
        names = ("first_loss", "last_loss", "median_step_s", "tokens_per_s", "idle_share")
        return {name: getattr(self, name) for name in names}


def _idle_share(steps: Sequence[StepMetrics]) -> dict[str, float] | None:
    known = [step for step in steps if step.busy_s]
    seconds = math.fsum(step.step_s or 0.0 for step in known)
    if not seconds:
        return None
    stages = known[-1].busy_s or {}
    return {stage: 1 - math.fsum((step.busy_s or {}).get(stage, 0.0) for step in known) / seconds for stage in stages}


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
