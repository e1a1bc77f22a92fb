"""Merges the ranks' reports of a step into its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dhp.base.messages import StageReport, StepInfo
from dhp.observe.metrics import StepMetrics
from dhp.observe.mfu import utilisation
from dhp.run.adaptive_recompute import activation_bytes
from dhp.step.stages import Stages

NO_MFU = "mfu is left out where it would be above 100%: the machine was busy when the peak of its devices was measured"


@dataclass(frozen=True)
class Timing:
    """step_s: from the end of the step before to this one's; data_s: of it, until the data were there. peak_flops: of
    all devices together, operations a second; None where it is not known."""

    step_s: float
    data_s: float
    peak_flops: float | None


def step_metrics(
    info: StepInfo, reports: Mapping[str, Sequence[StageReport]], timing: Timing, stages: Stages, skipped: int
) -> StepMetrics:
    """The line of metrics.jsonl. reports: by stage, of every rank; skipped: samples left out since the run began."""
    shares = [r.loss for name, of in reports.items() for r in stages[name].leaders(of) if r.loss is not None]
    memory = {name: [r.memory_bytes for r in of if r.memory_bytes is not None] for name, of in reports.items()}
    return StepMetrics(
        step=info.step + 1,
        epoch=info.done,
        loss=sum(shares) if info.total_weight else None,
        grad_norm=next(iter(reports.values()))[0].grad_norm,
        lr={group: rate for of in reports.values() for group, rate in of[0].lr.items()},
        tokens=info.tokens,
        target_tokens=info.target_tokens,
        vision_tokens=info.vision_tokens,
        samples=info.samples,
        images=info.images,
        cached_images=info.cached_images,
        clips=info.clips,
        step_s=timing.step_s,
        data_s=timing.data_s,
        busy_s=_busy(reports),
        tokens_per_s=info.tokens / timing.step_s,
        flops=info.flops,
        mfu=utilisation(info.flops, timing.step_s, timing.peak_flops),
        memory_bytes={name: max(peaks) for name, peaks in memory.items()} if all(memory.values()) else None,
        activation_bytes=activation_bytes(reports),
        comm_bytes={name: _summed(r.sent_bytes for r in of) for name, of in reports.items()},
        dist_ratio=info.dist_ratio,
        pad_ratio=1.0 - info.tokens / info.padded_tokens,
        sp_ratio=info.sp_ratio,
        skipped_samples=skipped,
    )


def notes(reports: Mapping[str, Sequence[StageReport]], metrics: StepMetrics, timing: Timing) -> Iterator[str]:
    """Notes of the step, each printed once in a run: by its ranks, and why it has no mfu where there is a peak."""
    yield from (note for of in reports.values() for report in of for note in report.notes)
    if metrics.mfu is None and timing.peak_flops is not None:
        yield NO_MFU


def _busy(reports: Mapping[str, Sequence[StageReport]]) -> dict[str, float] | None:
    """Mean of each stage's ranks; None where a rank was not measured."""
    known = {name: [report.busy_s for report in of if report.busy_s is not None] for name, of in reports.items()}
    return {name: sum(of) / len(of) for name, of in known.items()} if all(known.values()) else None


def _summed(of_ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Bytes by kind, of all ranks together."""
    return dict(sorted(sum(map(Counter, of_ranks), Counter()).items()))
