"""The helpers of tests do what tests rely on."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dhp.cluster.forks.fork_client import SERVER
from tests.helpers import forks
from tests.helpers.marks import MARK, mark_of
from tests.helpers.ranks import WARM, run_on_ranks
from tests.helpers.rows import on_demand, slow, slow_but
from tests.helpers.runs import ROOT, processes_of
from tests.helpers.skips import hold, is_allowed
from tests.helpers.together import group_of, place_of

LIMIT_S = 100  # beside other tests on a busy machine


def start(folder: Path, code: str) -> subprocess.Popen[str]:
    """A script that runs in a fork."""
    script = folder / "default_worker.py"
    script.write_text(code)
    environment = {**os.environ, **forks.environment(), MARK: folder.name}
    command = [sys.executable, os.fspath(script), "argument"]
    # Tests that a shell runs in the background inherit that interrupts are ignored, and so would what they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)


def fork_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return next(pid for pid in processes_of(process) if pid != process.pid)


def gone(pid: int) -> bool:
    return soon(lambda: not Path(f"/proc/{pid}").exists())


def soon(holds: Callable[[], bool]) -> bool:
    """Whether it holds before long: the server forgets a fork after it has ended."""
    deadline = time.monotonic() + LIMIT_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


@pytest.mark.parametrize(("code", "status"), [("", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1)])
def test_its_status_is_the_forks(tmp_path: Path, code: str, status: int) -> None:
    process = start(tmp_path, f"import sys, torch; print(sys.argv[1:], 'tests.helpers.warm' in sys.modules)\n{code}")
    out, error = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (status, "['argument'] True\n")
    assert ("ZeroDivisionError" in error) == (status == 1)


WAITS = "import time\ntry:\n    print('ready')\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    raise SystemExit(5)"


def test_an_interrupt_reaches_the_fork(tmp_path: Path) -> None:
    process = start(tmp_path, WAITS)
    fork_of(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 5


@pytest.mark.parametrize("stopped", [False, True])
def test_a_fork_ends_with_the_process_that_waits(tmp_path: Path, stopped: bool) -> None:
    process = start(tmp_path, WAITS)
    assert mark_of(process) == tmp_path.name
    pid = fork_of(process)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.wait(LIMIT_S)
    assert gone(pid) and soon(lambda: processes_of_mark(tmp_path.name) == [])


def processes_of_mark(mark: str) -> list[Path]:
    folder = forks.folder()
    assert folder is not None
    return list(folder.glob(f"{mark}-*"))


def test_a_fork_and_whoever_waits_may_be_killed_at_once(tmp_path: Path) -> None:
    process = start(tmp_path, WAITS)
    pid = fork_of(process)
    os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait(LIMIT_S)
    assert gone(pid)
    test_its_status_is_the_forks(tmp_path, "", 0)


def test_a_line_that_ends_early_ends_nothing_else(tmp_path: Path) -> None:
    for sent in (b"", b"\n", b"\n{"):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(forks.environment()[SERVER])
            line.sendall(sent)
    test_its_status_is_the_forks(tmp_path, "", 0)


def _loaded(name: str) -> bool:
    return name in sys.modules


@pytest.mark.parametrize("name", WARM)
def test_the_fork_server_has_imported_what_ranks_need(name: str) -> None:
    assert run_on_ranks(_loaded, 1, name) == [True]


def marks(rows: list[Any]) -> list[list[str]]:
    return [[mark.name for mark in getattr(row, "marks", ())] for row in rows]


def test_all_but_the_quick_ones() -> None:
    rows = slow_but([("a", 1), ("b", 2), on_demand("c", 3)], ("b", 2))
    assert marks(rows) == [["slow"], [], ["grid"]]
    assert [getattr(row, "values", row) for row in rows] == [("a", 1), ("b", 2), ("c", 3)]
    assert slow_but("abc", "b") == [slow("a"), "b", slow("c")]


@pytest.mark.parametrize("quick", [(), ("d",), (on_demand("c"),)], ids=["none", "not there", "marked"])
def test_a_table_without_a_quick_row_is_an_error(quick: tuple[Any, ...]) -> None:
    with pytest.raises(AssertionError, match="`make test` has none of it"):
        slow_but(["a", "b", on_demand("c")], *quick)


def report(reason: str, outcome: str = "skipped") -> pytest.TestReport:
    return pytest.TestReport("t.py::t", ("t.py", 1, "t"), {}, outcome, ("t.py", 1, f"Skipped: {reason}"), "call")


@pytest.mark.parametrize(
    ("reason", "allowed"),
    [
        ("could not import 'flash_attn.flash_attn_interface': No module named 'flash_attn'", True),
        ("bitsandbytes is not installed", True),
        ("wandb is not installed", True),
        ("reads Linux's table of sockets", True),
        ("could not import 'pyarrow': No module named 'pyarrow'", False),
        ("could not import 'datasets': No module named 'datasets'", False),
        ("it is slow", False),
        ("", False),
    ],
)
def test_a_skip_is_a_failure_unless_its_reason_is_listed(reason: str, allowed: bool) -> None:
    found = report(reason)
    hold(found)
    assert is_allowed(f"Skipped: {reason}") is allowed
    assert found.outcome == ("skipped" if allowed else "failed")
    assert allowed or "tests/helpers/skips.py" in str(found.longrepr)


def test_what_passed_or_is_known_to_fail_stays() -> None:
    passed, known = report("", "passed"), report("it is slow")
    known.wasxfail = "reason: known"
    for one in (passed, known):
        hold(one)
    assert (passed.outcome, known.outcome) == ("passed", "skipped")


def test_a_session_holds_its_skips_against_the_list(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "import pytest\n"
        "def test_allowed(): pytest.skip('wandb is not installed')\n"
        "def test_other(): pytest.skip('it is slow')\n"
        "@pytest.mark.skip(reason='it fails')\n"
        "def test_marked(): pass\n"
    )
    (tmp_path / "test_whole.py").write_text("import pytest\npytest.importorskip('nowhere')\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", str(tmp_path), str(tmp_path)]
    told = subprocess.run([*command, "--continue-on-collection-errors"], cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 1
    assert re.search(r"1 failed, 1 skipped, 2 errors", told.stdout), told.stdout
    for reason in ("it is slow", "it fails", "could not import 'nowhere'"):
        assert re.search(rf"{reason}.*: no test is skipped for that", told.stdout), reason


def test_groups_are_folders_files_and_single_tests() -> None:
    assert group_of("tests/cluster/test_groups.py::test_a") == group_of("tests/cluster/hangs/test_watch.py::test_b")
    assert group_of("tests/trainer/test_audio.py::test_a") == "tests/trainer/test_audio.py"
    assert group_of("tests/trainer/test_checkpoint_export.py::test_a") == group_of("tests/test_train_ray.py::test_b")
    assert group_of("tests/cli/test_plan.py::test_a") == "tests/cli/test_plan.py"
    alone = "tests/engine/test_parity.py::test_a[a::b]"
    assert group_of(alone) == alone


def test_runs_come_before_what_takes_no_time() -> None:
    ordered = ["tests/trainer/test_resume.py::a", "tests/engine/test_parity.py::a", "tests/config/test_load.py::a"]
    assert sorted(reversed(ordered), key=place_of) == ordered


def test_what_a_file_shares_is_made_once(tmp_path: Path) -> None:
    """In a suite of two workers: xdist's own groups once failed to hold, and nothing said so."""
    root = Path(__file__).parents[2]
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_xdist_make_scheduler  # noqa: F401\n")
    made = tmp_path / "made.txt"
    shared = f"""
import os, pytest

@pytest.fixture(scope="module")
def costly():
    with open({str(made)!r}, "a") as file:
        file.write("made ")

@pytest.mark.parametrize("number", range(12))
def test_it(number, costly):
    pass
"""
    (tmp_path / "test_shared.py").write_text(shared)
    (tmp_path / "test_other.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    words = ("-p", "no:cacheprovider", "-q", "-n", "2", "--dist", "loadgroup", f"--rootdir={tmp_path}", tmp_path)
    subprocess.run([sys.executable, "-m", "pytest", *words], cwd=root, check=True, stdout=subprocess.DEVNULL)
    assert made.read_text() == "made "
