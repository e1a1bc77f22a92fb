"""Stacks of actors that answer nothing: taken by a signal, grouped, and the one that stands elsewhere is named."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dhp.cluster import watch
from dhp.cluster.stacks import Frame, describe, group, keep_stacks, odd_ones, take_stacks, working
from dhp.cluster.watch import Watched
from tests.helpers.runs import ROOT

CODE = """
import os, sys, threading, time
from dhp.cluster.stacks import keep_stacks
keep_stacks(sys.argv[1], sys.argv[2])
def all_reduce():
    os.read(read, 1)
def load():
    time.sleep(600)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
read, _ = os.pipe()
print("ready", flush=True)
{"all_reduce": all_reduce, "load": load}[sys.argv[3]]()
"""
HELD = {"text-0": "all_reduce", "text-1": "all_reduce", "text-2": "load", "vision-0": "load"}


@pytest.fixture
def actors(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Processes with logs, blocked in C as ranks are in a collective."""
    started = {}
    for name, place in HELD.items():
        with (tmp_path / f"{name}.log").open("w") as log:
            command = [sys.executable, "-c", CODE, str(tmp_path), name, place]
            started[name] = subprocess.Popen(command, stdout=log, cwd=ROOT)
    try:
        while not all("ready" in (tmp_path / f"{name}.log").read_text() for name in HELD):
            time.sleep(0.05)
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def test_processes_that_wait_say_where_and_the_odd_one_is_named(
    actors: dict[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    stacks = take_stacks(HELD)
    assert {name: frames[0].name for name, frames in stacks.items()} == HELD
    assert odd_ones(stacks) == ["text-2"]
    assert "Thread 0x" in (tmp_path / "text-0.stacks").read_text()  # the other one is there too
    stuck = watch._stuck([Watched(f"text rank {rank}", "forward_step", None) for rank in range(3)], 2.0)
    said = str(stuck)
    assert "text-2 is not where the others of its part are, who may wait for it. A slow step" in said
    assert "\n  text-0, text-1: in all_reduce (<string>:" in said and "\n  text-2: in load (<string>:" in said
    assert stuck.fault is not None and stuck.fault.who == "text rank 2"
    actors["text-0"].kill()
    actors["text-0"].wait()
    assert set(take_stacks(HELD)) == set(HELD) - {"text-0"}


def test_a_dump_is_read() -> None:
    text = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f02 (most recent call first):
  File "/a/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 81 in all_reduce
  File "/work/dhp/parallel/comm.py", line 40 in sum_in_place
  File "<frozen runpy>", line 88 in _run_code
"""
    frames = working(text)
    assert [str(frame) for frame in frames] == [
        "all_reduce (torch/distributed/distributed_c10d.py:81)",
        "sum_in_place (dhp/parallel/comm.py:40)",
        "_run_code (<frozen runpy>:88)",
    ]
    assert describe({"text-0": frames}) == f"\n  text-0: in {frames[0]}, from {frames[1]}"
    assert working("") == ()


def test_who_is_odd_among_few() -> None:
    one, other = (Frame("a.py", 1, "one"),), (Frame("a.py", 2, "other"),)
    assert odd_ones({"text-0": one, "text-1": other}) == []  # of two nobody knows which
    assert odd_ones({"text-0": one, "text-1": one, "vision-0": other}) == []  # another part
    assert odd_ones({"text-0": one, "text-1": one, "text-2": other}) == ["text-2"]
    assert odd_ones({}) == [] and group({"b": one, "a": one, "c": other})[0][0] == ["a", "b"]


def test_an_actor_without_a_log_keeps_none(tmp_path: Path) -> None:
    keep_stacks(None, "text-0")
    assert not list(tmp_path.iterdir())
