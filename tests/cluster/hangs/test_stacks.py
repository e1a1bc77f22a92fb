"""Stacks of ranks, the control store, nodes that end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RpcError

from dhp.cluster import ray_private
from dhp.cluster.hangs import watch
from dhp.cluster.hangs.lookout import GONE, RUNS, STOPPED, NodeWatch, look
from dhp.cluster.hangs.vitals import Beat, Frame, Post, describe, group, odd_ones, take_stacks, working
from dhp.cluster.hangs.watch import asking, require_answers
from dhp.core.errors import ClusterError
from tests.helpers.posts import post_of
from tests.helpers.runs import ROOT

CODE = """
import os, sys, threading, time
from dhp.cluster.hangs.vitals import open_stacks
print(open_stacks(sys.argv[1] or None, sys.argv[2]))
def all_reduce():
    print("ready", flush=True); os.read(read, 1)
def load():
    print("ready", flush=True); time.sleep(600)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
read, _ = os.pipe()
{"all_reduce": all_reduce, "load": load}[sys.argv[3]]()
"""
HELD = {"text-0": "all_reduce", "text-1": "all_reduce", "text-2": "load", "vision-0": "load"}


@pytest.fixture
def actors(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Processes blocked in C as ranks are in a collective. One has no folder to write to."""
    started = {}
    for name, place in HELD.items():
        folder = "" if name == "text-1" else str(tmp_path)
        command = [sys.executable, "-c", CODE, folder, name, place]
        started[name] = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True)
    try:
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


def posts_of(actors: dict[str, subprocess.Popen[str]]) -> list[Post]:
    found = []
    for name, process in actors.items():
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        assert process.stdout.readline() == "ready\n"
        found.append(post_of(process.pid, name, path))
    return found


def test_processes_that_wait_say_where_and_the_odd_one_is_named(
    actors: dict[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    posts = posts_of(actors)
    assert posts[1].stacks.startswith("/proc/")
    dumps = take_stacks(posts)
    stacks = {post.name: working(dump) for post, dump in dumps.items()}
    assert {name: frames[0].name for name, frames in stacks.items()} == HELD
    assert odd_ones(stacks) == ["text-2"]
    assert "Thread 0x" in (tmp_path / "text-0.stacks").read_text()  # the other one is there too
    assert not (tmp_path / "text-1.stacks").exists()
    said = describe(stacks)
    assert "\n  text-0, text-1: in all_reduce (<string>:" in said
    assert "\n  text-2, vision-0: in load (<string>:" in said
    actors["text-0"].kill()
    actors["text-0"].wait()
    actors["text-2"].send_signal(signal.SIGSTOP)  # it would answer when it goes on
    os.waitpid(actors["text-2"].pid, os.WUNTRACED)
    assert {post.name for post in take_stacks(posts)} == {"text-1", "vision-0"}


@pytest.mark.slow
def test_a_process_that_has_the_id_of_one_that_ended_gets_no_signal(actors: dict[str, subprocess.Popen[str]]) -> None:
    posts = [replace(post, begun=post.begun - 60) for post in posts_of(actors)]
    assert take_stacks(posts, wait_s=0.5) == {}


def test_a_dump_is_read() -> None:
    text = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f02 (most recent call first):
  File "/a/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 81 in all_reduce
  File "/work/dhp/parallel/traffic.py", line 90 in timed
  File "/work/dhp/parallel/comm.py", line 40 in sum_in_place
  File "/work/dhp/cluster/forks/server.py", line 192 in _run
"""
    frames = working(text)
    assert [str(frame) for frame in frames] == [
        "all_reduce (torch/distributed/distributed_c10d.py:81)",
        "sum_in_place (dhp/parallel/comm.py:40)",
        "_run (dhp/cluster/forks/server.py:192)",
    ]
    assert describe({"text-0": frames}) == f"\n  text-0: in {frames[0]}, from {frames[1]}"
    assert describe({"data": frames[2:]}) == f"\n  data: in {frames[2]}"  # that says nothing of what it does
    assert working("") == ()


def test_who_is_odd_among_few() -> None:
    one, other = (Frame("a.py", 1, "one"),), (Frame("a.py", 2, "other"),)
    assert odd_ones({"text-0": one, "text-1": other}) == []  # of two nobody knows which
    assert odd_ones({"text-0": one, "text-1": one, "vision-0": other}) == []  # another part
    assert odd_ones({"text-0": one, "text-1": one, "text-2": other}) == ["text-2"]
    assert odd_ones({}) == [] and group({"b": one, "a": one, "c": other})[0][0] == ["a", "b"]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether it answers, to be changed."""
    state = [True]

    def exists(*_: Any, timeout: float) -> bool:
        if not state[0]:
            raise RpcError("Deadline Exceeded")
        return False

    monkeypatch.setattr(
        ray_private, "global_worker", SimpleNamespace(gcs_client=SimpleNamespace(internal_kv_exists=exists))
    )
    monkeypatch.setattr(watch, "_EVERY_S", 0.02)
    return state


def test_silence_is_an_error_and_an_answer_in_time_is_none(answers: list[bool]) -> None:
    require_answers()  # nobody asks
    with asking():
        time.sleep(0.7)
        require_answers()
        answers[0] = False
        require_answers()
        time.sleep(0.7)
        with pytest.raises(
            ClusterError, match=r"control store \(gcs_server, .*\) has not answered 6 questions in a row"
        ):
            require_answers()
        answers[0] = True
        time.sleep(0.2)
        require_answers()
    require_answers()


def test_through_the_client_there_is_no_way_to_it(answers: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "client", SimpleNamespace(is_connected=lambda: True))
    answers[0] = False
    with asking():
        time.sleep(0.6)
        require_answers()


def test_a_driver_that_was_stopped_itself_goes_on(answers: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """On waking, its clock has gone on, and nobody has asked meanwhile."""
    monkeypatch.setattr(watch, "_EVERY_S", 60.0)
    with asking():
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 100.0)
        require_answers()


def test_five_questions_without_an_answer_are_no_error_whatever_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def exists(*_: Any, timeout: float) -> bool:
        asked.append(timeout)
        if len(asked) % 6:
            raise ValueError("no error of Ray's")
        return False

    store = SimpleNamespace(gcs_client=SimpleNamespace(internal_kv_exists=exists))
    monkeypatch.setattr(ray_private, "global_worker", store)
    monkeypatch.setattr(watch, "_EVERY_S", 0.01)
    with asking():
        deadline = time.monotonic() + 30
        while len(asked) < 20 and time.monotonic() < deadline:
            require_answers()
    assert len(asked) >= 20


def test_a_process_runs_is_stopped_or_is_gone(tmp_path: Path) -> None:
    beat = tmp_path / "text-1.heartbeat"
    beat.write_text(json.dumps(asdict(Beat(2, "forward_step", 0, time.monotonic() - 5))))
    process = subprocess.Popen(["sleep", "600"])
    try:
        post = post_of(process.pid, "text-1", heartbeat=str(beat))
        (sight,) = NodeWatch().look([post], stacks=False)
        assert (sight.post, sight.state, sight.stacks) == (post, RUNS, "")
        assert sight.beat is not None and sight.beat.verb == "forward_step" and 5 <= sight.beat.verb_s < 60
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert [one.state for one in look([post, replace(post, begun=0.0)], stacks=False)] == [STOPPED, GONE]
    finally:
        process.kill()
        process.wait()
    (sight,) = look([post], stacks=True)
    assert (sight.state, sight.stacks) == (GONE, "")
