"""Heartbeats of ranks, what stalls, what a node says."""

import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dhp.cluster.hangs import vitals
from dhp.cluster.hangs.lookout import GONE, SILENT, STOPPED, Seen, Stall, find_stall, frames, suspects
from dhp.cluster.hangs.vitals import Beat, Heart, keep_heartbeat, make_post, open_lasting_file, read_beat
from dhp.core.collectives import CallRecord, Collective
from tests.helpers.posts import seen


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


LIMIT_S = 60.0
COMPUTES = Beat(3, "forward_step", 0, 70.0, None, counts={"0": 4})
IDLE = Beat(3, "", None, 70.0, None, counts={"0": 4})


def inside(held_s: float, number: int, members: tuple[int, ...] = (0, 1, 2), group: str = "0", **more: object) -> Beat:
    call = f"allreduce_(float32[4]), call {number} in group {group} of {len(members)} ranks"
    told = {"counts": {group: number}, "group": group, "number": number, "members": members, "call": call, **more}
    return Beat(3, "forward_step", 0, held_s + 1, held_s, **told)  # type: ignore[arg-type]


def found(*ranks: Seen, limit_s: float = LIMIT_S) -> Stall | None:
    return find_stall({one.who: one for one in ranks}, limit_s)


def names(some: object) -> list[str]:
    return [one.who for one in some]  # type: ignore[attr-defined]


def test_the_rank_that_has_not_entered_is_named_and_not_those_inside() -> None:
    waiting = [seen(f"text rank {rank}", inside(65.0 + rank, 5)) for rank in (0, 1)]
    stall = found(*waiting, seen("text rank 2", COMPUTES), seen("vision rank 2", COMPUTES))
    assert stall is not None and stall.waiting.who == "text rank 1"
    assert names(stall.missing) == names(stall.causes) == ["text rank 2"]


def test_before_the_limit_and_outside_of_methods_nothing_stalls() -> None:
    missing = seen("text rank 1", COMPUTES)
    assert found(seen("text rank 0", inside(59.0, 5)), missing) is None
    assert found(seen("text rank 0", inside(61.0, 5)), missing) is not None
    loading = replace(inside(61.0, 5), verb="")  # that has a limit of its own
    assert found(seen("text rank 0", loading), missing) is None
    assert found(seen("text rank 0", COMPUTES), missing) is None and found() is None


def test_a_rank_outside_of_the_group_is_not_asked_for() -> None:
    waiting = seen("text rank 0", inside(65.0, 5, members=(0, 2)))
    stall = found(waiting, seen("text rank 1", COMPUTES), seen("text rank 2", COMPUTES), seen("text.1 rank 2", IDLE))
    assert stall is not None and names(stall.missing) == ["text rank 2"]


def test_a_rank_that_waits_itself_is_missing_but_not_the_cause() -> None:
    first = seen("text rank 0", inside(65.0, 5, members=(0, 1)))
    second = seen("text rank 1", inside(64.0, 9, members=(1, 3), group="7"))
    third = seen("text rank 3", COMPUTES)
    stall = found(first, second, third)
    assert stall is not None and (names(stall.missing), names(stall.causes)) == (["text rank 1"], ["text rank 3"])


def test_a_rank_that_waits_for_its_next_call_is_held_up_by_one_that_computes() -> None:
    first, idle = seen("text rank 0", inside(65.0, 5)), seen("text rank 1", IDLE)
    vision = [seen("vision rank 0", IDLE), seen("vision rank 1", COMPUTES)]
    stall = found(first, idle, *vision)
    assert stall is not None and (names(stall.missing), names(stall.causes)) == (["text rank 1"], ["vision rank 1"])
    stopped = seen("vision rank 0", IDLE, STOPPED)
    stall = found(first, idle, stopped)
    assert stall is not None and names(stall.causes) == ["vision rank 0"]
    stall = found(first, idle, vision[0])  # nobody is known
    assert stall is not None and names(stall.causes) == ["text rank 1"]


def test_a_stopped_rank_is_the_cause_whatever_its_last_heartbeat_says() -> None:
    stopped = seen("text rank 1", inside(70.0, 4), STOPPED)
    stall = found(seen("text rank 0", inside(65.0, 5)), stopped)
    assert stall is not None and stall.waiting.who == "text rank 0" and names(stall.causes) == ["text rank 1"]
    assert stopped.held_s is None and stopped.stands and seen("text rank 1", None, GONE).stands


def test_two_groups_that_wait_for_one_another_are_both_named() -> None:
    first = seen("text rank 0", inside(65.0, 5, (0, 1), counts={"0": 5, "7": 1}))
    second = seen("text rank 1", inside(64.0, 2, (0, 1), group="7", counts={"0": 4, "7": 2}))
    stall = found(first, second)
    assert stall is not None and names(stall.causes) == ["text rank 1", "text rank 0"]


def test_an_exchange_by_messages_waits_for_whom_nothing_holds() -> None:
    waiting = seen("vision rank 0", inside(65.0, 4))
    stall = found(waiting, seen("vision rank 1", inside(3.0, 4)), seen("vision rank 2", COMPUTES))
    assert stall is not None and names(stall.missing) == ["vision rank 2"]
    stall = found(waiting, seen("vision rank 1", inside(3.0, 4)))
    assert stall is not None and not stall.missing and not stall.causes


def test_on_a_gpu_only_a_rank_that_has_begun_fewer_counts() -> None:
    waiting = seen("text rank 0", inside(65.0, 5, device=True))
    assert found(waiting, seen("text rank 1", inside(59.0, 5, device=True))) is None  # it computes
    assert found(waiting, seen("text rank 1", replace(COMPUTES, counts={"0": 5}, device=True))) is None
    assert found(seen("text rank 0", inside(65.0, 5, (0,), device=True))) is None  # it waits for nobody
    stall = found(waiting, seen("text rank 1", inside(61.0, 4, device=True)))
    assert stall is not None and names(stall.missing) == ["text rank 1"]


def test_on_gpus_a_collective_that_all_have_begun_and_none_ends_is_one_that_nobody_is_missing_in() -> None:
    ranks = [seen(f"text rank {rank}", inside(61.0 + rank, 5, device=True)) for rank in range(3)]
    stall = found(*ranks, seen("vision rank 0", IDLE))
    assert stall == Stall(ranks[2], (), ())
    held_up = seen("vision rank 0", inside(61.0, 5, (0, 1), device=True))  # for less long, but by somebody
    stall = found(*ranks, held_up, seen("vision rank 1", COMPUTES))
    assert stall is not None and (stall.waiting, names(stall.missing)) == (held_up, ["vision rank 1"])


def test_a_rank_that_writes_a_checkpoint_is_waited_for_as_long_as_the_limit_from_its_end() -> None:
    waiting, inner = seen("text rank 1", inside(800.0, 5)), seen("text rank 2", inside(700.0, 9, (0, 2), group="7"))
    for verb in ("save", "saved"):
        saving = seen("text rank 0", replace(COMPUTES, verb=verb, verb_s=800.0))
        assert found(waiting, saving) is None and names(suspects({o.who: o for o in (waiting, saving)}, [])) == [
            "text rank 0"
        ]
        assert found(waiting, saving, inner) is None  # whoever waits for the one that waits for it
        assert found(waiting, seen(saving.who, saving.beat, SILENT)) is None
        stopped = found(waiting, seen(saving.who, saving.beat, STOPPED))
        assert stopped is not None and names(stopped.missing) == ["text rank 0"]
        other = found(waiting, saving, seen("vision rank 0", inside(61.0, 5)), seen("vision rank 1", COMPUTES))
        assert other is not None and names(other.missing) == ["vision rank 1"]
    assert found(waiting, seen("text rank 0", replace(COMPUTES, saved_s=59.0))) is None
    stall = found(waiting, seen("text rank 0", replace(COMPUTES, saved_s=61.0)))
    assert stall is not None and names(stall.missing) == ["text rank 0"]


def test_whose_node_does_not_answer_is_preferred_to_peers_that_only_seem_not_to_wait() -> None:
    waiting, between = seen("text rank 0", inside(65.0, 5)), seen("text rank 1", replace(COMPUTES, counts={"0": 5}))
    for last in (None, inside(3.0, 5)):  # what it did before does not say that it still does
        silent = seen("text rank 2", last, SILENT, node="10.0.0.6")
        stall = found(waiting, between, silent)
        assert stall is not None and list(stall.missing) == list(stall.causes) == [silent] and stall.silent
        assert suspects({one.who: one for one in (waiting, between, silent)}, []) == [silent]
        stall = found(waiting, seen("text rank 1", COMPUTES), silent)  # that one is known to be behind
        assert stall is not None and names(stall.missing) == ["text rank 2", "text rank 1"]
    assert seen("text rank 2", None, SILENT, node="10.0.0.6").describe() == (
        "text rank 2 on node 10.0.0.6: its node does not answer (is it down, or cut off?)"
    )


DUMP = 'Current thread 0x01 (most recent call first):\n  File "/work/dhp/engine/text_engine.py", line {} in {}\n'


def test_where_nothing_moves_the_suspects_are_found_in_turn() -> None:
    stopped, computes = seen("text rank 0", COMPUTES, STOPPED), seen("text rank 1", COMPUTES)
    held = seen("text rank 2", inside(5.0, 5))
    everyone = {one.who: one for one in (stopped, computes, held)}
    assert names(suspects(everyone, everyone)) == ["text rank 0"]
    del everyone["text rank 0"]
    assert names(suspects(everyone, everyone)) == ["text rank 1"]
    places = [(10, "forward"), (10, "forward"), (99, "load")]
    alike = {
        f"text rank {rank}": seen(f"text rank {rank}", COMPUTES, stacks=DUMP.format(*place))
        for rank, place in enumerate(places)
    }
    assert names(suspects(alike, alike)) == ["text rank 2"]
    assert suspects(alike, ["text rank 0", "text rank 2"]) == []  # of two nobody knows which
    assert set(frames(alike)) == {"text-0", "text-1", "text-2"} and frames(everyone) == {}


def test_what_a_rank_does_is_said_with_its_node_and_how_to_wake_it() -> None:
    doing = "step 3, forward_step of micro-batch 0 for 70 s; no collective so far"
    assert seen("text rank 1", COMPUTES, node="10.0.0.6").describe() == f"text rank 1 on node 10.0.0.6: {doing}"
    stopped = seen("text rank 1", COMPUTES, STOPPED).describe()
    assert stopped.startswith("text rank 1: is stopped (SIGSTOP or a debugger; `kill -CONT 77` lets it go on); before")
    assert seen("text rank 1", None, GONE).describe() == "text rank 1: its process is gone"
    assert seen("the dataset actor", None).describe() == "the dataset actor: runs"


def test_a_file_lies_beside_the_logs_or_in_memory_of_the_process(tmp_path: Path) -> None:
    file, path = open_lasting_file(str(tmp_path), "text-0.stacks", append=True)
    os.write(file, b"first ")
    os.write(file, b"second")
    assert path == str(tmp_path / "text-0.stacks") and Path(path).read_text() == "first second"
    for folder in (None, str(tmp_path / "missing")):
        file, path = open_lasting_file(folder, "text-0.stacks")
        os.write(file, b"here")
        assert path == f"/proc/{os.getpid()}/fd/{file}" and Path(path).read_text() == "here"
        os.close(file)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "text-0.stacks").symlink_to(tmp_path / "elsewhere")
    file, path = open_lasting_file(str(tmp_path), "text-0.stacks")
    assert path.startswith("/proc/") and not (tmp_path / "elsewhere").exists()
    os.close(file)


def test_the_process_is_found_again() -> None:
    process = make_post("text-0", "here", "/missing").process()
    assert process is not None and process.pid == os.getpid()
