"""mypy holds every room of dhp, and every function of theirs to its annotations."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]


def test_every_room_is_checked_and_no_function_of_any_may_lack_types() -> None:
    rooms = {str(file.parent.relative_to(ROOT)) for file in (ROOT / "dhp").glob("*/__init__.py")}
    assert rooms - set(SETTINGS["files"]) == {"dhp/report"} and SETTINGS["strict"]
    off = {"disallow_untyped_defs", "disallow_incomplete_defs", "ignore_errors"}
    for override in SETTINGS["overrides"]:
        assert "no-untyped-def" not in override.get("disable_error_code", ()) and not off & set(override)


@pytest.mark.slow
def test_a_function_without_types_is_seen(tmp_path: Path) -> None:
    """Negative control: mypy with these settings, on a file that stands for one of `models`."""
    pytest.importorskip("mypy")
    (tmp_path / "layers.py").write_text("def f(a, b: int) -> None: ...\ndef _g(): ...\ndef h(a: int) -> None: ...\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "layers.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout.splitlines()
    assert [line.split(":")[1] for line in found if "[no-untyped-def]" in line] == ["1", "2"]
