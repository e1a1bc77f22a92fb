"""events.jsonl: what happened beside steps, of every attempt."""

from __future__ import annotations

import time
from pathlib import Path

from dhp.observe.ranks import SAVE, START, EventWriter, read_events


def test_later_attempts_append_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    before = time.time()
    for step in (0, 10):
        writer = EventWriter(tmp_path)
        writer.write(START, step)
        writer.write(SAVE, step + 5, 0.5, "saved")
        writer.close()
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write('{"event": "sa')
    found = read_events(tmp_path)
    assert [(one.event, one.step, one.seconds, one.text) for one in found] == [
        ("start", 0, None, ""),
        ("save", 5, 0.5, "saved"),
        ("start", 10, None, ""),
        ("save", 15, 0.5, "saved"),
    ]
    assert before <= found[0].time <= time.time()


def test_a_run_without_the_file_has_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
