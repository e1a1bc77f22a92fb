"""A short plain run, for what judges runs."""

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.runs import Outcome


@pytest.fixture(scope="session")
def first_run(long_run: tuple[Path, Outcome], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The run that tests share, as one that was never evaluated."""
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    shutil.copytree(long_run[0], run_dir, symlinks=True)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["kind"] == "train"))
    return run_dir, long_run[1]
