"""Ctrl-C and SIGTERM end whatever stands, at any time, with status 130."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dhp.core.process import asked_to_stop, deferring, end, go_on, interruptible, was_interrupted
from tests.helpers.rows import slow
from tests.helpers.runs import LIMIT_S, ROOT, processes_of, tiny, train

BOTH = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """A shell's background job, as tests may be, ignores SIGINT, and so does whatever it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", BOTH)
def test_a_run_is_left_by_keyboard_interrupt_and_its_end_by_nothing(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in BOTH]
    with interruptible():
        assert not was_interrupted()
        with pytest.raises(KeyboardInterrupt):
            send(number)
        with pytest.raises(KeyboardInterrupt):
            send(number)
        assert was_interrupted()
        end()
        send(number)
    assert [signal.getsignal(n) for n in BOTH] == before


@pytest.mark.parametrize("number", BOTH)
def test_while_training_the_first_signal_asks_and_the_second_ends(number: signal.Signals) -> None:
    with interruptible():
        with deferring():
            assert not asked_to_stop()
            send(number)
            assert asked_to_stop() and was_interrupted()
            with pytest.raises(KeyboardInterrupt):
                send(number)
        assert asked_to_stop()
        with pytest.raises(KeyboardInterrupt):
            send(number)
    with interruptible(), deferring():
        assert not asked_to_stop()  # another run's


def test_an_alarm_that_ray_set_is_called_off() -> None:
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    left_s = signal.alarm(100)
    try:
        with interruptible(), pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)
        assert signal.alarm(0) == 0
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.alarm(left_s)


@pytest.mark.parametrize("number", BOTH)
def test_outside_a_run_the_process_ends_at_once_in_one_line(number: signal.Signals) -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import os; from dhp.core.process import heed; heed()\n"
        f"try:\n    os.kill(os.getpid(), {int(number)})\nexcept BaseException:\n    print('caught')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"interrupted ({number.name})\n")


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    code = (
        "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from dhp.core.process import heed; heed(); os.kill(os.getpid(), signal.SIGINT); print('on')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "on\n")


def wait_for(condition) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_imports_are_interrupted_in_one_line(tiny_assets: Path, tmp_path: Path, number: signal.Signals) -> None:
    def interrupt(process: subprocess.Popen[str]) -> None:
        wait_for(lambda: b"libtorch" in Path(f"/proc/{process.pid}/maps").read_bytes())
        process.send_signal(number)

    outcome = train(*tiny(tiny_assets, tmp_path / "run"), meanwhile=interrupt, real=True)
    assert (outcome.status, outcome.stderr) == (130, f"interrupted ({number.name})\n")
    assert not (tmp_path / "run").exists() and outcome.left == ()


@pytest.mark.parametrize("program", ["gcs_server", slow("raylet/raylet")])
def test_the_start_of_ray_is_interrupted(tiny_assets: Path, tmp_path: Path, program: str) -> None:
    run_dir = tmp_path / "run"

    def interrupt(process: subprocess.Popen[str]) -> None:
        wait_for(lambda: any(program in command.split()[0] for command in processes_of(process).values()))
        process.send_signal(signal.SIGTERM)

    outcome = train(*tiny(tiny_assets, run_dir), meanwhile=interrupt, private_ray=True)
    assert outcome.status == 130, outcome.stderr
    assert outcome.stderr == "interrupted\n"
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
    assert outcome.left == ()


def test_a_part_that_was_ended_may_be_begun_again() -> None:
    with interruptible():
        end()
        go_on()
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_signal_that_came_meanwhile_counts_then() -> None:
    with interruptible():
        end()
        send(signal.SIGINT)  # ignored
        with pytest.raises(KeyboardInterrupt):
            go_on()
        assert was_interrupted()
