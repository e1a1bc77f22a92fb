"""What a rank does, in a file that others read: its verb, its collectives, since when."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dhp.cluster.hangs import vitals
from dhp.cluster.hangs.vitals import Beat, Heart, keep_heartbeat, read_beat
from dhp.core.collectives import CallRecord, Collective


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def begin_call(record: CallRecord, number: int) -> None:
    tensors = ((torch.float32, (2, 3)),)
    record.last = Collective("0", 2, number, "allreduce_", tensors, (0, 1))
    record._numbers["0"] = number
    record.last_begun = time.monotonic()


def test_it_says_what_the_rank_does_and_in_which_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    record = CallRecord()
    heart = Heart(3, device=False, record=record)
    assert heart.beat() == Beat(4, "", None, 100.0)
    now[0] = 101.0
    heart.begin("forward_step", 1)
    now[0] = 102.0
    with record.held():
        begin_call(record, 7)
        assert heart.beat() == Beat(
            *(4, "forward_step", 1, 101.0, 102.0, False, None, {"0": 7}, "0", 7, (0, 1)),
            "allreduce_(float32[2, 3]), call 7 in group 0 of 2 ranks",
        )
        now[0] = 103.0
        with record.held():  # one function within another is one wait
            assert heart.beat().held_s == 102.0
        assert heart.beat().held_s == 102.0
    assert heart.beat().held_s is None and heart.beat().counts == {"0": 7}
    heart.end(steps=1)
    assert (heart.beat().step, heart.beat().verb, heart.beat().verb_s) == (5, "", 103.0)


def test_it_says_since_when_the_rank_is_done_with_a_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    heart = Heart(3, device=False, record=CallRecord())
    heart.begin("save")
    assert heart.beat().saved_s is None
    now[0] = 900.0
    heart.end()
    heart.begin("forward_step", 0)
    now[0] = 910.0
    heart.end()
    assert heart.beat().saved_s == 900.0
    path = tmp_path / "text-1.heartbeat"
    path.write_text(json.dumps(asdict(heart.beat())))
    now[0] = 930.0
    read = read_beat(str(path))
    assert read is not None and (read.saved_s, read.verb_s, read.held_s) == (30.0, 20.0, None)


def test_on_a_gpu_a_verb_is_held_by_the_last_collective_that_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    record = CallRecord()
    heart = Heart(0, device=True, record=record)
    begin_call(record, 1)
    now[0] = 2.0
    heart.begin("backward_step", 0)
    assert heart.beat().held_s is None  # what it began was before
    now[0] = 3.0
    begin_call(record, 2)
    assert heart.beat().held_s == 3.0
    heart.end()
    assert heart.beat().held_s is None


def test_another_process_reads_the_seconds_until_now(tmp_path: Path) -> None:
    path, said = tmp_path / "text-1.heartbeat", [Beat(3, "forward_step", 0, time.monotonic() - 50, None)]
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    keep_heartbeat(file, lambda: said[0], period_s=0.01)
    wait_until(lambda: read_beat(str(path)) is not None)
    read = read_beat(str(path))
    assert read is not None and read.held_s is None and 50 <= read.verb_s < 80
    held = {"held_s": time.monotonic() - 20, "counts": {"0": 2}, "members": (0, 1), "call": "allreduce_"}
    said[0] = Beat(3, "backward_step", 0, time.monotonic() - 30, **held)
    wait_until(lambda: (read_beat(str(path)) or said[0]).verb_s < 45)
    read = read_beat(str(path))
    assert read is not None and read.held_s is not None and 20 <= read.held_s < 45
    assert (read.verb, read.counts, read.members) == ("backward_step", {"0": 2}, (0, 1))


def test_a_disk_that_fails_for_a_while_ends_no_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls, write, cut = tmp_path / "text-1.heartbeat", [0, 0], os.pwrite, os.ftruncate

    def failing(which: int, error: int, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[which] += 1
            if calls[which] <= 2:
                raise OSError(error, os.strerror(error))
            return real(*arguments)

        return call

    monkeypatch.setattr(os, "pwrite", failing(0, errno.ENOSPC, write))
    monkeypatch.setattr(os, "ftruncate", failing(1, errno.ESTALE, cut))
    beat = Beat(3, "forward_step", 0, time.monotonic(), None)
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(file, b"x" * 5000)  # what is left of an older one
    keep_heartbeat(file, lambda: beat, period_s=0.01)
    wait_until(lambda: read_beat(str(path)) is not None)
    assert calls == [5, 3]  # what was not written whole was written again, then no more
    time.sleep(0.1)
    assert calls == [5, 3]


def test_a_heartbeat_that_is_being_written_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, whole = tmp_path / "text-1.heartbeat", json.dumps(asdict(Beat(3, "save", None, time.monotonic())))
    path.write_text(f"{whole}\n-of-a-longer-one}}\n")  # written, not cut off yet
    monkeypatch.setattr(time, "sleep", lambda _: path.write_text(whole))
    read = read_beat(str(path))
    assert read is not None and (read.step, read.verb) == (3, "save")


def test_what_is_no_heartbeat_is_none(tmp_path: Path) -> None:
    half = tmp_path / "half"
    half.write_text('{"step": 1, "ver')
    assert read_beat(str(half)) is None and read_beat(str(tmp_path / "missing")) is None


@pytest.mark.parametrize(
    ("beat", "action"),
    [
        (Beat(3, "forward_step", 1), "step 3, forward_step of micro-batch 1"),
        (Beat(3, "optimizer_step"), "step 3, optimizer_step"),
        (Beat(3, "save"), "save"),
        (Beat(3), "after step 2, waits for its next call"),
        (Beat(1), "waits for its next call"),
    ],
)
def test_it_reads_as_a_person_says_it(beat: Beat, action: str) -> None:
    assert beat.action == action
    assert str(beat) == f"{action} for 0 s; no collective so far"


def test_its_words_have_the_collectives() -> None:
    beat = Beat(2, "forward_step", 0, 9.4, 7.2, counts={"7": 4, "0": 2}, call="allreduce_(…)")
    assert str(beat) == (
        "step 2, forward_step of micro-batch 0 for 9 s, in one collective for 7 s; collectives so far: 2 in group 0, "
        "4 in group 7; the last call: allreduce_(…)"
    )
    assert vitals.PERIOD_S <= 1.0
