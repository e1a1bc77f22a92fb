"""What runs of one method took, and the row that is printed of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from dhp.observe.metrics import StepMetrics


@dataclass(frozen=True)
class Run:
    """One run of a method. steps: those that count. samples: of all steps, the others included."""

    steps: Sequence[StepMetrics]
    samples: int

    @property
    def seconds(self) -> float:
        """Of all steps that count."""
        return sum(step.step_s for step in self.steps)

    @property
    def samples_per_s(self) -> float:
        """All samples over all seconds: steps that hold little do not count as much as others."""
        return sum(step.samples for step in self.steps) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """As samples; padding is no token."""
        return sum(step.tokens for step in self.steps) / self.seconds

    @property
    def pad_ratio(self) -> float:
        """Padding of all steps over all that the model was given."""
        given = sum(step.tokens / (1 - step.pad_ratio) for step in self.steps)
        return 1 - sum(step.tokens for step in self.steps) / given

    @property
    def data_share(self) -> float:
        """Share of the time that went by waiting for data."""
        return sum(step.data_s or 0.0 for step in self.steps) / self.seconds

    @property
    def dist_ratio(self) -> dict[str, float] | None:
        """Mean idle share of the steps for each part; None where the run does not tell."""
        told = [step.dist_ratio for step in self.steps if step.dist_ratio]
        return {part: mean(ratio[part] for ratio in told) for part in told[0]} if told else None


def counted(steps: Sequence[StepMetrics], warm_up: int) -> Run:
    """A run without its first steps."""
    return Run(steps[warm_up:], sum(step.samples for step in steps))


def require_same_samples(runs: Mapping[str, Run]) -> None:
    """Raises RuntimeError where one method showed fewer samples than another."""
    shown = {name: run.samples for name, run in runs.items()}
    if len(set(shown.values())) > 1:
        raise RuntimeError(f"methods showed different numbers of samples in an epoch: {shown}")


def row(method: str, runs: Sequence[Run], base: Sequence[Run]) -> dict[str, Any]:
    """Medians over the rounds. base: the runs of the same rounds that the speedup is over."""
    speedups = [run.samples_per_s / other.samples_per_s for run, other in zip(runs, base, strict=True)]
    dist = runs[0].dist_ratio
    return {
        "method": method,
        "samples_per_s": round(median(run.samples_per_s for run in runs), 3),
        "tokens_per_s": round(median(run.tokens_per_s for run in runs), 1),
        "speedup": round(median(speedups), 3),
        "speedups": [round(speedup, 3) for speedup in speedups],
        "pad_ratio": round(median(run.pad_ratio for run in runs), 4),
        "dist_ratio": dist and {part: round(median(run.dist_ratio[part] for run in runs), 4) for part in dist},
        "step_s": round(median(step.step_s for run in runs for step in run.steps), 3),
        "steps": [len(run.steps) for run in runs],
        "data_share": round(median(run.data_share for run in runs), 4),
        "samples": runs[0].samples,
    }
