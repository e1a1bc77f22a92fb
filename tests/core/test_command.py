"""Printed commands: by the console command where a shell finds this Python's own, else by modules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dhp.core.text import own_command


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with a console command, which is not on the PATH."""
    for name in ("python", "dhp"):
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(sys, "argv", ["somewhere/dhp/__main__.py"])
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    return tmp_path / "bin" / "dhp"


def test_without_a_console_command_modules_are_named(script: Path) -> None:
    assert own_command() == ["python", "-m", "dhp"]
    assert own_command("export", "a", "b") == ["python", "-m", "dhp", "export", "a", "b"]
    assert own_command("train", "my.yaml") == ["python", "-m", "dhp.train_ray", "my.yaml"]


def test_that_of_this_python_is_named_where_a_shell_finds_it(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(script.parent))
    assert own_command("train", "my.yaml") == ["dhp", "train", "my.yaml"]
    assert own_command("export", "a") == ["dhp", "export", "a"]


def test_that_of_another_python_is_not(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(script.parent))
    monkeypatch.setattr(sys, "executable", "/usr/elsewhere/bin/python")
    assert own_command("export") == ["python", "-m", "dhp", "export"]


def test_what_was_called_by_its_path_is_named_by_it(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "train", "my.yaml"])
    assert own_command("train", "my.yaml") == [str(script), "train", "my.yaml"]
