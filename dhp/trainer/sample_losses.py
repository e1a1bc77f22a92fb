"""Which sample had which loss in a step, from what the ranks report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from dhp.core.batch import StepInfo
from dhp.core.reports import StageReport
from dhp.step.stages import Stages


def mean_losses(
    info: StepInfo, reports: Mapping[str, Sequence[StageReport]], stages: Stages
) -> dict[str, list[float | None]]:
    """By dataset, parallel to `StepInfo.rows`, the mean loss of each sample's target tokens, nats; None for one without
    any, or left out. Of a row that the step has twice, the mean of both. Empty where ranks report none."""
    sums: dict[tuple[str, int], float] = defaultdict(float)
    targets: dict[tuple[str, int], int] = defaultdict(int)
    for name, of in reports.items():
        sharing = stages[name].spec.degrees.sequence
        for shard, report in enumerate(stages[name].leaders(of)):
            if report.samples is None:
                continue
            for micro_batch, losses in report.samples.sums.items():
                places = info.order[micro_batch][shard // sharing]
                counts = report.samples.targets[micro_batch]
                for place, loss, count in zip(places, losses, counts, strict=True):
                    sums[place] += loss
                    targets[place] += count
    if not sums:
        return {}
    return {
        name: [sums[name, row] / targets[name, row] if targets.get((name, row)) else None for row in rows]
        for name, rows in info.rows.items()
    }
