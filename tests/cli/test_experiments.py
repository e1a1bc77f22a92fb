"""`dhp experiments` as far as it refuses, and how it starts what lies beside the package."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dhp.__main__ import main
from dhp.cli.experiments import CHECKOUT, read_arguments

ROOT = Path(__file__).parents[2]


def test_an_installed_package_has_none_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dhp.cli.experiments.CHECKOUT", tmp_path)
    assert main(["experiments", "list"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"ConfigError: there are no experiments beside {tmp_path / 'dhp'}: ")
    assert "Run this command in a checkout of the repository" in said


def test_it_starts_the_experiments_of_its_own_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Sequence[str], Path, str]] = []

    def call(words: Sequence[str], cwd: Path, env: dict[str, str]) -> int:
        started.append((words, cwd, env["PYTHONPATH"]))
        return 3

    monkeypatch.setattr("subprocess.call", call)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert main(["experiments", "run", "balance", "--quick", "--seed", "1"]) == 3
    words = [sys.executable, "-m", "experiments", "run", "balance", "--quick", "--seed", "1"]
    assert started == [(words, ROOT, str(ROOT))] and CHECKOUT == ROOT


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["list"], {"what": "list"}),
        (["run", "all", "--quick"], {"what": "run", "name": "all", "quick": True}),
        (["run", "soak"], {"what": "run", "name": "soak", "quick": False}),
    ],
)
def test_what_is_asked(arguments: list[str], found: dict[str, Any]) -> None:
    asked, more = read_arguments(arguments)
    assert vars(asked) == found and more == []


def test_arguments_behind_the_name_are_the_experiments_own() -> None:
    asked, more = read_arguments(["run", "layouts", "--quick", "--sizes", "1k", "4k", "--rounds", "1"])
    assert asked.quick and more == ["--sizes", "1k", "4k", "--rounds", "1"]
    assert read_arguments(["run", "x", "--qu"])[1] == ["--qu"]  # no abbreviation of ours


@pytest.mark.parametrize("arguments", [[], ["lst"], ["run"], ["list", "balance"], ["index", "x"]])
def test_what_is_not_understood_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_arguments(arguments)
    assert ended.value.code == 2 and "usage: " in capsys.readouterr().err
