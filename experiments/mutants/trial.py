"""A mistake planted in a copy of the tree, and what the tests of the file's room say of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from experiments.mutants.mutations import Mutation

KILLED, SURVIVED, LATE = "killed", "survived", "no answer in time"
_NO_FAILURE = {0: SURVIVED, 5: SURVIVED}  # pytest's: all passed, or there are no tests


@dataclass(frozen=True)
class Verdict:
    """What became of a mistake. told: the first test that failed, or nothing."""

    mutation: Mutation
    outcome: str
    told: str


def copy_tree(root: Path, folder: Path) -> None:
    """All files that git knows of, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)


def try_mutation(copy: Path, mutation: Mutation, limit_s: float) -> Verdict:
    """Plant it, run the tests, take it back."""
    file = copy / mutation.file
    source = file.read_bytes()
    try:
        file.write_bytes(mutation.plant(source))
        outcome, told = SURVIVED, ""
        for tests in _tests_of(copy, mutation.file):  # one after another: pytest orders what it is given together
            if outcome == SURVIVED:
                outcome, told = _run(copy, tests, limit_s)
        return Verdict(mutation, outcome, told)
    finally:
        file.write_bytes(source)


def _tests_of(copy: Path, file: Path) -> list[list[str]]:
    """The file's own tests, then those of its room: dhp/step/step.py has tests/step/test_evaluate.py."""
    inside = file.relative_to("dhp")
    own, room = Path("tests") / inside.parent / f"test_{inside.name}", Path("tests") / inside.parts[0]
    return [[str(own)], [str(room), f"--ignore={own}"]] if (copy / own).exists() else [[str(room)]]


def _run(copy: Path, tests: list[str], limit_s: float) -> tuple[str, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    with TemporaryFile("w+") as said:  # no pipe: a process that outlives the tests would hold it open
        running = subprocess.Popen(command, cwd=copy, env=env, stdout=said, stderr=said, start_new_session=True)
        try:
            running.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            return LATE, ""
        said.seek(0)
        lines = said.read().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return _NO_FAILURE.get(running.returncode, KILLED), failed[0] if failed else ""
