"""The wheel: what it holds, and that it works where no checkout is, with its command and configurations."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMIT_S = 300


def run(*words: str | Path, where: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a folder, which sees neither a checkout nor a package index."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = outside | {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | environment
    words = tuple(map(str, words))
    return subprocess.run(words, cwd=where, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from a copy, so that what was built before is not in it."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("dhp", "configs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", *(one.name for one in ROOT.glob("requirements*.txt"))):
        shutil.copy(ROOT / file, tree)
    flags = ("--quiet", "--no-deps", "--no-build-isolation")
    done = run(sys.executable, "-m", "pip", "wheel", *flags, "--wheel-dir", out, ".", where=tree)
    assert done.returncode == 0, done.stderr
    (found,) = out.glob("dhp-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the wheel is installed, without what it depends on, and its command is on the PATH."""
    target = tmp_path_factory.mktemp("installed")
    flags = ("--quiet", "--no-deps", "--target", target)
    done = run(sys.executable, "-m", "pip", "install", *flags, wheel, where=target)
    assert done.returncode == 0, done.stderr
    return {"PYTHONPATH": str(target), "PATH": os.pathsep.join([str(target / "bin"), os.environ.get("PATH", "")])}


def test_it_holds_every_module_and_every_configuration(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "dhp").rglob("*.py")}
    files = [file for file in (ROOT / "configs").rglob("*") if file.suffix in (".yaml", ".json")]
    assert modules <= names
    assert {str(Path("dhp") / file.relative_to(ROOT)) for file in files} <= names


def test_the_command_works_in_another_folder(installed: dict[str, str], tmp_path: Path) -> None:
    shown = run("dhp", "--help", where=tmp_path, **installed)
    assert shown.returncode == 0 and "COMMAND" in shown.stdout and "\n  train " in shown.stdout
    explained = run("dhp", "train", "--help", "data.balance", where=tmp_path, **installed)
    assert explained.stdout.startswith("data.balance: text; default `random`"), explained.stderr
    words = run("dhp", "completion", "words", "train", "--config-name=ti", where=tmp_path, **installed)
    assert words.stdout == "--config-name=tiny\n"


@pytest.mark.slow
def test_a_shipped_configuration_is_planned_in_another_folder(installed: dict[str, str], tmp_path: Path) -> None:
    done = run("dhp", "train", "--config-name=tiny", "training.dry_run=true", where=tmp_path, **installed)
    assert done.returncode == 0, done.stderr
    assert "nothing was started" in done.stdout and (tmp_path / "assets" / "tiny" / "model").is_dir()
    refused = run("dhp", "train", "--config-name=tini", where=tmp_path, **installed)
    assert refused.returncode == 1 and "did you mean tiny?" in refused.stderr
