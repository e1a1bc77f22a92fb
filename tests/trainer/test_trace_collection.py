"""What every rank did, on one clock, and the steps above it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dhp.core.tracing import FORWARD, Span
from dhp.observe.metrics import StepMetrics
from dhp.observe.trace import FILE, TraceWriter
from dhp.trainer.step_reports import Tracing


class Group:
    """Ranks whose clocks are behind the driver's."""

    def __init__(self, *offsets: int):
        self.offsets = list(offsets)

    def take_spans_async(self, keep: bool = True) -> list[Any]:
        return [f"spans of {rank}" if keep else "nothing" for rank in range(len(self.offsets))]

    def clock_offsets(self, timeout_s: float) -> list[int]:
        assert timeout_s == 9.0
        return self.offsets


def test_steps_and_ranks_share_a_clock(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, {"vision": 1, "text": 2})
    tracing = Tracing({"vision": Group(0), "text": Group(5_000, -5_000)}, writer, 9.0)
    assert tracing.submit(7) == {"vision": ["spans of 0"], "text": ["spans of 0", "spans of 1"]}
    span = Span("forward_step 0", FORWARD, 1_000_000, 2_000_000)
    tracing.write({"vision": [[span]], "text": [[span], [span]]})
    tracing.mark_step(StepMetrics(step=7, loss=2.0, data_s=0.0005), 0.0005, 0.003)
    writer.close()
    events = [event for event in json.loads((tmp_path / FILE).read_text()) if event["ph"] == "X"]
    assert [(event["pid"], event["tid"], event["name"], event["ts"], event["dur"]) for event in events] == [
        (0, 0, "forward_step 0", 1000.0, 1000.0),
        (1, 0, "forward_step 0", 1005.0, 1000.0),
        (1, 1, "forward_step 0", 995.0, 1000.0),
        (2, 0, "step 7", 500.0, 2500.0),
        (2, 0, "for data", 500.0, 500.0),
    ]


def test_steps_outside_of_the_window_are_forgotten(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, {"vision": 1})
    tracing = Tracing({"vision": Group(0)}, writer, 9.0, range(5, 7))
    assert [tracing.submit(step)["vision"][0] for step in (4, 5, 6, 7)] == ["nothing", *["spans of 0"] * 2, "nothing"]
    for step in (4, 5, 6, 7):
        tracing.mark_step(StepMetrics(step=step, data_s=0.0), step, step + 1.0)
    writer.close()
    events = [event for event in json.loads((tmp_path / FILE).read_text()) if event["ph"] == "X"]
    assert [event["name"] for event in events] == ["step 5", "step 6"]
