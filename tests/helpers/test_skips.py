"""What may be skipped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.runs import ROOT
from tests.helpers.skips import hold, is_allowed


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
