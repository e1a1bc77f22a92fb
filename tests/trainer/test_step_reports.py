"""What the ranks report of a step, put together."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dhp.core.axes import Degrees
from dhp.core.batch import StepInfo
from dhp.core.reports import StageReport
from dhp.observe.metrics import StepMetrics
from dhp.observe.planned import Planned
from dhp.observe.ranks import RankShare
from dhp.trainer.step_reports import NO_MFU, SKIPPED_SHOWN, Timing, left_out, notes, rank_shares, step_metrics

COUNTS: dict[str, Any] = {
    **{
        "samples": 2,
        "images": 1,
        "tokens": 90,
        "target_tokens": 30,
        "total_weight": 30,
        "vision_tokens": 64,
        "padded_tokens": 100,
    },
    **{"dist_ratio": {"text": 0.0}, "flops": {"text": 50}, "skipped": (), "data_s": 0.1, "measure_s": 0.0},
}
INFO = StepInfo(step=3, epoch=0, done=0.5, **COUNTS)
STAGES: Any = {
    name: SimpleNamespace(
        leaders=lambda of: list(of), spec=SimpleNamespace(part=name, degrees=Degrees(data=2 // tensor, tensor=tensor))
    )
    for name, tensor in (("vision", 1), ("text", 2))
}


def report(rank: int, busy_s: float | None, loss: float | None = None, comm_s: float | None = None) -> StageReport:
    return StageReport(rank, loss, 2.5, {"vision": 1e-3}, None, {"handoff": 8}, busy_s=busy_s, comm_s=comm_s)


def told(vision: list[StageReport], text: list[StageReport]) -> StepMetrics:
    return step_metrics(INFO, {"vision": vision, "text": text}, Timing(2.0, 0.5, 100.0), STAGES, 4, 1)


def test_a_stage_is_as_busy_as_its_ranks_in_the_mean() -> None:
    metrics = told([report(0, 0.25), report(1, 0.75)], [report(0, 1.25, loss=1.0), report(1, 1.25, loss=0.5)])
    assert metrics.busy_s == {"vision": 0.5, "text": 1.25}
    assert (metrics.kind, metrics.step, metrics.epoch, metrics.loss, metrics.grad_norm) == ("train", 4, 0.5, 1.5, 2.5)
    assert (metrics.step_s, metrics.data_s, metrics.tokens_per_s, metrics.mfu) == (2.0, 0.5, 45.0, 0.25)
    assert metrics.comm_bytes == {"vision": {"handoff": 16}, "text": {"handoff": 16}}
    assert (metrics.pad_ratio, metrics.skipped_samples, metrics.skipped_steps) == (pytest.approx(0.1), 4, 1)
    assert metrics.sample_digest is None and metrics.stage_norms is None
    norms = {"vision": 0.7, "text": 2.4}
    by_stage = [[replace(report(0, None), stage_norm=norm)] for norm in norms.values()]
    assert told(*by_stage).stage_norms == norms


def test_the_seconds_of_ranks_are_held_against_their_work() -> None:
    """Of what they compute themselves, by the planned time of a mean rank, or else by what the mean rank took."""
    info = replace(INFO, work={"vision": (3.0, 1.0), "text": (8.0,)})
    reports = {
        "vision": [report(0, 1.0, comm_s=0.4), report(1, 1.0, comm_s=0.6)],
        "text": [report(0, 1.0, 1.0, 0.5), report(1, 1.0, 1.0, 0.25)],
    }
    shares = rank_shares(info, reports, STAGES)
    assert shares == {
        "vision": [RankShare("vision rank 0", 0.6, 3.0), RankShare("vision rank 1", 0.4, 1.0)],
        "text": [RankShare("text rank 0", 0.5, 8.0), RankShare("text rank 1", 0.75, 8.0)],
    }
    planned = Planned(busy_s={"text": 0.6}, comm_s={"text": 0.1})
    paces = step_metrics(info, reports, Timing(2.0, 0.5, None, planned), STAGES, 0, 0).rank_pace
    assert paces is not None and paces["text"] == {"min": 1.0, "median": 1.25, "max": 1.5, "rank": "text rank 1"}
    assert paces["vision"] == pytest.approx({"min": 0.8, "median": 1.2, "max": 1.6, "rank": "vision rank 1"})
    on_gpu = {"vision": reports["vision"], "text": [report(0, 1.0, 1.0), report(1, 1.0, 1.0)]}
    assert set(rank_shares(info, on_gpu, STAGES)) == {"vision"} and not rank_shares(INFO, reports, STAGES)


def test_bad_samples_are_listed_up_to_a_number() -> None:
    lines = list(left_out(replace(INFO, skipped=tuple(f"sample {n}" for n in range(SKIPPED_SHOWN + 2)))))
    assert lines[:2] == ["skipped: sample 0", "skipped: sample 1"] and len(lines) == SKIPPED_SHOWN + 1
    assert lines[-1] == "skipped: 2 more; `python -m dhp inspect data` lists them"
    assert list(left_out(INFO)) == []


def test_busy_is_not_told_where_a_stage_was_not_measured() -> None:
    assert told([report(0, None)], [report(0, 1.0)]).busy_s is None


@pytest.mark.parametrize(
    ("peak", "mfu", "said"), [(100.0, 0.25, []), (25.0, 1.0, []), (20.0, None, [NO_MFU]), (None, None, [])]
)
def test_why_a_step_has_no_mfu_is_said(peak: float | None, mfu: float | None, said: list[str]) -> None:
    reports = {"vision": [report(0, 0.25)], "text": [replace(report(0, 1.25, loss=1.0), notes=("of a rank",))]}
    timing = Timing(2.0, 0.5, peak)
    metrics = step_metrics(INFO, reports, timing, STAGES, 4, 1)
    assert metrics.mfu == mfu
    assert list(notes(reports, metrics, timing)) == ["of a rank", *said]
