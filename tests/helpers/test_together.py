"""Tests that share something costly go to one worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.helpers.together import group_of, place_of


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
