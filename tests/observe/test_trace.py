"""The Chrome trace: one row a rank, one clock, readable whenever the run ends."""

from __future__ import annotations

import json
import math
from pathlib import Path

from dhp.core.tracing import FORWARD, WAIT, Span
from dhp.observe.trace import FILE, TraceWriter


def test_rows_are_named_and_times_are_microseconds_on_one_clock(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, {"vision": 2, "text": 1})
    writer.write("vision", 1, [Span("forward_step 0", FORWARD, 2_000, 5_000)])
    writer.write("text", 0, [Span("for forward_step 0", WAIT, 1_000, 2_000)], offset_ns=10_000)
    writer.close()
    writer.close()
    events = json.loads((tmp_path / FILE).read_text())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(0, 0): "vision 0", (0, 1): "vision 1", (1, 0): "text 0", (2, 0): "steps"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["vision", "text", "run"]
    assert [e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"] == [0, 1, -1]
    forward, wait = (e for e in events if e["ph"] == "X")
    assert (forward["pid"], forward["tid"], forward["ts"], forward["dur"]) == (0, 1, 2.0, 3.0)
    assert (wait["pid"], wait["tid"], wait["ts"], wait["dur"], wait["cat"]) == (1, 0, 11.0, 1.0, "wait")


def test_steps_are_marked_above_the_ranks(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, {"vision": 1})
    writer.mark_step(4, 1.0, 0.25, 3.5, loss=math.nan)
    writer.mark_step(5, 3.5, 0.0, 4.0, loss=2.0)
    writer.close()
    events = [event for event in json.loads((tmp_path / FILE).read_text()) if event["ph"] != "M"]
    row = {"pid": 1, "tid": 0}
    assert events == [
        {"name": "step 4", "cat": "step", "ph": "X", "ts": 1e6, "dur": 2.5e6, "args": {"loss": "NaN"}, **row},
        {"name": "for data", "cat": "data", "ph": "X", "ts": 1e6, "dur": 0.25e6, **row},
        {"name": "end of step 4", "cat": "step", "ph": "i", "s": "g", "ts": 3.5e6, **row},
        {"name": "step 5", "cat": "step", "ph": "X", "ts": 3.5e6, "dur": 0.5e6, "args": {"loss": 2.0}, **row},
        {"name": "end of step 5", "cat": "step", "ph": "i", "s": "g", "ts": 4e6, **row},
    ]


def test_what_was_written_is_there_before_the_file_is_closed(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, {"vision": 1})
    writer.write("vision", 0, [Span("a", FORWARD, 0, 1)])
    text = (tmp_path / FILE).read_text()
    assert json.loads(text + "]")[-1]["name"] == "a"  # viewers read an array without its end
