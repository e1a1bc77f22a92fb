"""The supervisor over stand-ins for a driver, in processes of their own: what it starts again, ends, says and keeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dhp.supervise.attempt import COMPLETED, INTERRUPTED, KILLED, REFUSED, Attempt, Verdict
from dhp.supervise.supervisor import judge
from tests.helpers.marks import MARK, marked_processes
from tests.helpers.runs import ROOT, heed_interrupts

LIMIT_S = 300

# Does in each attempt what the argument of that number says.
DRIVER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from dhp.core.errors import HUNG, RAISED, ConfigError, Fault, MoreDevices, PartFailed, TooFewDevices
from dhp.supervise.attempt import this_attempt
from dhp.supervise.attempt import Layout, Layouts

attempt = this_attempt()
attempt.opened()
attempt.in_state("training")
print("attempt", attempt.number, "restarts", attempt.restarts, flush=True)
print("layout", os.environ.get("LAYOUT") or "own", "larger", *attempt.larger, flush=True)
for word in sys.argv[attempt.number].split("+"):
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "aborted":
        os.abort()
    elif word == "raised":
        attempt.ended(PartFailed("the norm is nan", Fault(RAISED, "text rank 0", step=3)))
        sys.exit(75)
    elif word == "refused":
        sys.exit(1)
    elif word == "hung":
        attempt.ended(PartFailed("nothing moved", Fault(HUNG)))
    elif word == "done":
        attempt.ended(None)
    elif word == "layouts":
        attempt.has_layouts(Layouts(Layout(4), (Layout(2, ("text.num_actors=2",)),)))
    elif word == "loading":
        attempt.in_state("loading")
    elif word == "barred":
        attempt.ended(ConfigError("this node has no data"))
        sys.exit(1)
    elif word == "few":
        attempt.ended(TooFewDevices("2 are there", 2))
        sys.exit(75)
    elif word == "more":
        attempt.ended(MoreDevices("4 are there", 4))
        sys.exit(75)
    elif word == "saved":
        attempt.saved(Path(f"step_{attempt.number}"))
    elif word == "orphan":  # in a session of its own, and no child of anybody's
        subprocess.run(["sh", "-c", "setsid sleep 600 & exit 0"], check=True)
    elif word == "sleeps":
        time.sleep(600)
    elif word == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif word == "heeds":
        def end(number, frame):
            attempt.ended(KeyboardInterrupt())
            sys.exit(130)
        signal.signal(signal.SIGTERM, end)
        print("ready", flush=True)
"""

SUPERVISOR = """
import os, sys
from pathlib import Path
from dhp.supervise import supervisor as driver
from dhp.supervise.policy import Rules
from dhp.supervise.supervisor import Supervisor

driver.GRACE_S = 0.2
folder, *words = sys.argv[1:]
print("begins", flush=True)
def commands(begun):
    os.environ["LAYOUT"] = " ".join(begun.layout)
    return [sys.executable, "-c", Path(folder, "driver.py").read_text(), *words]
sys.exit(Supervisor(commands, Path(folder) / "run", Rules(2, 0.01), stopping_s=1.0).run())
"""


@dataclass(frozen=True)
class Outcome:
    """How it ended. kept: the verdicts in run_dir. left: command lines of processes that were still there."""

    status: int
    lines: list[str]
    kept: list[dict]
    left: list[str]


def supervised(folder: Path, *words: str, meanwhile: Callable[[subprocess.Popen[str]], None] | None = None) -> Outcome:
    """Attempt number n does what the n-th of `words` says."""
    (folder / "driver.py").write_text(DRIVER)
    (folder / "run").mkdir()
    mark = f"{folder}"
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(folder), *words],
        cwd=ROOT,
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    try:
        if meanwhile is not None:
            meanwhile(process)
        stdout, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    kept = [json.loads(file.read_text()) for file in sorted((folder / "run" / "faults").glob("*.json"))]
    return Outcome(process.returncode, stdout.splitlines(), kept, list(marked_processes(mark).values()))


def test_a_driver_that_is_killed_is_started_again(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "saved+killed", "aborted", "done")
    assert outcome.status == 0 and outcome.left == []
    assert [line for line in outcome.lines if line.startswith("attempt") and "restarts" in line] == [
        *("attempt 1 restarts 0", "attempt 2 restarts 1", "attempt 3 restarts 2")
    ]
    assert "restart 1 of 2, after 0.01 s, from step_1" in outcome.lines
    assert [(one["attempt"], one["kind"], one["exit_code"]) for one in outcome.kept] == [
        *((1, KILLED, -signal.SIGKILL), (2, KILLED, -signal.SIGABRT), (3, COMPLETED, 0))
    ]
    assert "ended by SIGABRT while training" in outcome.kept[1]["message"]


def test_restarts_are_used_up(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "killed", "killed", "killed")
    assert outcome.status == 1 and outcome.left == []
    assert "attempt 3 failed, and there is no other one: training.max_restarts=2 are used up" in outcome.lines[-1]
    assert outcome.lines[-1].endswith("since the newest checkpoint; there is no checkpoint")
    assert outcome.kept[-1]["followed_by"] == "training.max_restarts=2 are used up since the newest checkpoint"


def test_the_same_exception_twice_ends_the_run(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "raised", "raised")
    assert outcome.status == 1
    assert [(one["part"], one["rank"], one["step"]) for one in outcome.kept] == [("text", 0, 3), ("text", 0, 3)]
    assert outcome.kept[1]["followed_by"] == "attempt 1 ended in the same way at step 3: another would too"


def test_a_run_that_is_refused_is_not_started_again(tmp_path: Path) -> None:
    assert supervised(tmp_path, "refused").status == 1


def test_a_teardown_that_hangs_is_ended(tmp_path: Path) -> None:
    """Asleep or stopped, with a process that nobody knows any more."""
    outcome = supervised(tmp_path, "orphan+hung+sleeps", "hung+stopped", "done+sleeps")
    assert outcome.status == 0 and outcome.left == []
    assert outcome.lines.count("the driver has not ended in its time: killing it with all that it started") == 3
    assert [one["kind"] for one in outcome.kept] == ["hung", "hung", "completed"]


def test_what_the_driver_leaves_is_ended(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "orphan+killed", "done")
    assert outcome.status == 0 and outcome.left == []
    assert "ended what the driver left: sleep" in outcome.lines


def test_the_layout_follows_the_devices(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "layouts+saved+killed", "few", "saved+more", "done")
    assert outcome.status == 0
    assert [line for line in outcome.lines if line.startswith("layout")] == [
        *("layout own larger", "layout own larger", "layout text.num_actors=2 larger 4", "layout own larger")
    ]
    moved = "restart, not counted, for it goes on in another layout, after 0 s, from step_"
    assert f"{moved}1, in the layout text.num_actors=2" in outcome.lines and f"{moved}3" in outcome.lines
    assert [(one["kind"], one["devices"]) for one in outcome.kept] == [
        *(("killed", None), ("fewer devices", 2), ("more devices", 4), ("completed", None))
    ]


def test_a_layout_that_cannot_be_is_left_again(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "layouts+saved+killed", "few", "saved+more", "loading+barred", "saved+done")
    assert outcome.status == 0
    assert [line for line in outcome.lines if line.startswith("layout")][2:] == [
        *("layout text.num_actors=2 larger 4", "layout own larger", "layout text.num_actors=2 larger")
    ]
    assert [one["kind"] for one in outcome.kept] == [
        *("killed", "fewer devices", "more devices", "refused", "completed")
    ]


def say_after(word: str, number: signal.Signals) -> Callable[[subprocess.Popen[str]], None]:
    def send(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        while word not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)

    return send


def test_a_signal_reaches_the_driver_and_ends_the_run(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "heeds+sleeps", meanwhile=say_after("ready", signal.SIGTERM))
    assert outcome.status == 130 and outcome.kept == [] and outcome.left == []


def test_a_driver_that_does_not_heed_a_signal_is_killed(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "stopped", meanwhile=say_after("attempt 1", signal.SIGINT))
    assert outcome.status == 130 and outcome.left == []


def test_the_driver_ends_with_its_supervisor(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "heeds+sleeps", meanwhile=say_after("ready", signal.SIGKILL))
    assert outcome.status == -signal.SIGKILL
    deadline = time.monotonic() + LIMIT_S
    while marked_processes(str(tmp_path)):
        assert time.monotonic() < deadline


def test_an_exit_status_is_judged_by_what_was_said(tmp_path: Path) -> None:
    attempt = Attempt(str(tmp_path), 1, 0)
    silent = {code: judge(attempt, code, killed=False, interrupted=False) for code in (0, 1, 75, 130, -9)}
    assert {code: verdict.kind for code, verdict in silent.items()} == {
        **{0: COMPLETED, 1: REFUSED, 75: REFUSED, 130: INTERRUPTED, -9: KILLED}
    }
    assert [code for code, verdict in silent.items() if verdict.restartable] == [75, -9]
    assert judge(attempt, -9, killed=False, interrupted=False, at=12.5).at == 12.5
    assert judge(attempt, -9, killed=True, interrupted=True).kind == INTERRUPTED
    attempt.ended(None)
    assert judge(attempt, -9, killed=True, interrupted=False) == Verdict(1, COMPLETED, state="starting", exit_code=-9)
    failed_after = judge(attempt, 1, killed=False, interrupted=False)
    assert failed_after.kind == REFUSED and not failed_after.restartable
