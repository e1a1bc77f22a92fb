"""A copy of the examples, in which their pages are followed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.runs import ROOT


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walks") / "examples"
    return Path(shutil.copytree(ROOT / "examples", folder, ignore=shutil.ignore_patterns("__pycache__")))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the command `dhp`."""
    return tmp_path_factory.mktemp("bin")
