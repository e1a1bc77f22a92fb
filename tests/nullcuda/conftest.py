"""The environment of null CUDA, made once, and the file that rows go to."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import ROOT
from tests.nullcuda.stand_ins import make

Keep = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="session")
def nullcuda() -> Path:
    folder = Path(os.environ.get("NULLCUDA_FOLDER", ROOT / ".venv" / "nullcuda"))
    make(folder)
    return folder


@pytest.fixture
def keep_row(pytestconfig: pytest.Config) -> Keep:
    """Appends a row to the file of `--nullcuda-rows`, if there is one."""
    file = pytestconfig.getoption("--nullcuda-rows")

    def keep(row: dict[str, Any]) -> None:
        print(json.dumps(row))
        if file is not None:
            with Path(file).open("a", encoding="utf-8") as results:
                results.write(json.dumps(row) + "\n")

    return keep
