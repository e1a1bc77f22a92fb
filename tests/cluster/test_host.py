"""Clock, processes, memory and links of a host."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import ray._private.tensor_serialization_utils as tensors
import torch

from dhp.cluster import clock, link_seconds
from dhp.cluster.clock import BusyTime, ClockReading, offset_ns, read_clock
from dhp.cluster.link_seconds import measure_links
from dhp.cluster.servers import silence_understood_warnings
from dhp.core.errors import ClusterError
from dhp.core.reports import Spent
from dhp.core.tracing import add_waited, take_waited
from tests.helpers.rows import slow


def test_processes_of_one_host_share_the_clock() -> None:
    assert offset_ns(read_clock) == 0


def test_another_hosts_clock_is_placed_by_the_fastest_answer() -> None:
    ahead = 5_000_000_000

    def other() -> ClockReading:
        return ClockReading("another host", time.perf_counter_ns() + ahead)

    assert abs(offset_ns(other) + ahead) < 50_000_000


class Clock:
    """Told times, one at each question."""

    def __init__(self, *times: float) -> None:
        self._times = iter(times)

    def perf_counter(self) -> float:
        return next(self._times)


def test_stretches_add_up_until_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "time", Clock(1.0, 1.5, 10.0, 12.0, 20.0, 21.0))
    time = BusyTime(cuda=False)
    for kind in ("forward", "backward"):
        with time.measured(kind):
            pass
    assert time.take("backward", 0.0) == {"forward": Spent(0.5, 0.0), "backward": Spent(2.0, 0.0)}
    with time.measured("forward"):
        pass
    assert (time.take("optimizer", 0.0), time.take("optimizer", 0.0)) == ({"forward": Spent(1.0, 0.0)}, {})


def test_collectives_count_for_the_kind_that_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer's method takes what was counted, so what is left of it is its own."""
    monkeypatch.setattr(clock, "time", Clock(0.0, 2.0, 2.0, 3.0))
    take_waited()
    time = BusyTime(cuda=False)
    with time.measured("forward"):
        add_waited(0.5)
    with time.measured("optimizer"):
        add_waited(0.25)
        whole = take_waited()
    assert time.take("optimizer", whole) == {"forward": Spent(1.5, 0.5), "optimizer": Spent(0.75, 0.25)}


class Event:
    """Stands for torch.cuda.Event on a stream that has come as far as `done`, a millisecond from event to event."""

    recorded, done = 0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 1
        self.at = Event.recorded

    def query(self) -> bool:
        return self.at <= Event.done

    def elapsed_time(self, end: Event) -> float:
        return float(end.at - self.at)


def test_on_a_gpu_nobody_waits_for_what_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.Event", Event)
    time = BusyTime(cuda=True)
    for _ in range(3):
        with time.measured("forward"):
            pass
    Event.done = 4  # two verbs are through
    assert time.take("forward", None) == {"forward": Spent(pytest.approx(0.002), None)}
    Event.done = 6
    assert time.take("forward", None) == {"forward": Spent(pytest.approx(0.001), None)}


def test_only_warnings_that_are_understood_are_left_out() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        silence_understood_warnings()
        warnings.warn("Zero-copy tensor serialization is enabled, but it only works safely …", stacklevel=1)
        array = torch.zeros(2).numpy()
        array.flags.writeable = False
        torch.from_numpy(array)
        warnings.warn("something else may cause data corruption", stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["something else may cause data corruption"]


def test_ray_still_says_it_in_these_words() -> None:
    assert "Zero-copy tensor serialization is enabled" in inspect.getsource(tensors)


REDIRECTED = """
import sys
from dhp.cluster.servers import redirect_output
redirect_output(sys.argv[1], "text-0")
print("what the rank says")
"""


def redirected(log_dir: Path) -> str:
    """What a process says on its own stdout whose output goes to a log there."""
    return subprocess.run(
        [sys.executable, "-c", REDIRECTED, log_dir], check=True, capture_output=True, text=True
    ).stdout


def test_a_log_is_appended_to(tmp_path: Path) -> None:
    assert redirected(tmp_path / "logs") == redirected(tmp_path / "logs") == ""
    assert (tmp_path / "logs" / "text-0.log").read_text() == "what the rank says\n" * 2


@pytest.mark.parametrize("linked", ["logs", "logs/text-0.log"])
def test_no_log_goes_to_what_a_link_leads_to(tmp_path: Path, linked: str) -> None:
    """Of another run, say, whose log it would be mixed with."""
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "text-0.log"
    other.write_text("of another run")
    if linked == "logs":
        (tmp_path / "logs").symlink_to(tmp_path / "other")
    else:
        (tmp_path / "logs").mkdir()
        (tmp_path / linked).symlink_to(other)
    said = redirected(tmp_path / "logs")
    assert said.startswith("text-0: the log stays here") and said.endswith("what the rank says\n")
    assert other.read_text() == "of another run"


PROBE = """
import ctypes, resource, sys
from dhp.cluster.host import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else False
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p

def touch(size=100 * 2**20):
    block = library.malloc(ctypes.c_size_t(size))
    ctypes.memset(block, 1, size)
    library.free(ctypes.c_void_p(block))

touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
FEW, MANY = 20, 40  # faults for 100 MB: 25,600 of 4 KB, but about 50 where the kernel gives pages of 2 MB unasked


def probe(asked: str, **environment: str) -> tuple[str, int]:
    """What keeping answered, and the page faults of a second block."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "LD_PRELOAD"))}
    command = [sys.executable, "-c", PROBE, asked]
    kept, faults = subprocess.run(
        command, capture_output=True, text=True, check=True, env=clean | environment
    ).stdout.split()
    return kept, int(faults)


def test_freed_memory_is_used_again():
    kept, faults = probe("keep")
    assert kept == "True" and faults < FEW


@pytest.mark.slow
def test_by_itself_the_library_gives_it_back():
    """What keeping is for; should this fail, it is not needed any more."""
    assert probe("leave")[1] > MANY


@pytest.mark.parametrize("name, value", [slow("MALLOC_ARENA_MAX", "4"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=4")])
def test_an_environment_that_chooses_is_left_alone(name: str, value: str):
    kept, faults = probe("keep", **{name: value})
    assert kept == "False" and faults > MANY


@pytest.mark.slow
def test_both_ways_of_sending_take_time() -> None:
    found = measure_links("cpu", 1, (1 << 17, 1 << 20))
    assert found.sums is not None
    for pairs in (found.sums, found.handovers):
        assert [size for size, _ in pairs] == [1 << 17, 1 << 20]
        assert all(0 < seconds < math.inf for _, seconds in pairs)


@pytest.mark.slow
def test_a_process_that_fails_is_named() -> None:
    with pytest.raises(ClusterError, match="failed: .*plan with the rates of a known device"):
        measure_links("no device", 1, (1 << 17,))


def test_no_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_seconds, "TIMEOUT_S", 0.0)
    with pytest.raises(ClusterError, match="no answer"):
        measure_links("cpu", 1, (1 << 17,))


def test_what_opens_a_connection_is_no_part_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of 3 s beside 2 s of computing, whose first two calls take 100 s, on a clock of the test's own."""
    now, calls = [0.0], [0]
    monkeypatch.setattr(link_seconds.time, "perf_counter", lambda: now[0])

    def computing() -> None:
        now[0] += 2.0

    def run() -> None:
        calls[0] += 1
        now[0] += 100.0 if calls[0] <= 2 else 3.0

    assert link_seconds._beside(run, computing, torch.device("cpu")) == 3.0
