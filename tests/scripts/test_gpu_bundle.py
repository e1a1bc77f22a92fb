"""What a bare machine lacks is packed: chosen by what packages say that they need, small, and found there."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from scripts.gpu_bundle import LEFT_OUT, ROOT, THERE, UNUSED, find_lacking, find_needed, read_requirements

LARGE = ("ray", "transformers", "deepspeed", "huggingface-hub", "peft")


def test_what_lacks_is_all_that_is_needed_but_what_is_there() -> None:
    named = set(read_requirements(ROOT / "requirements.txt"))
    assert {"ray", "hydra-core", "av"} <= named and not any("[" in name for name in named)
    lacking, there = find_lacking(THERE), find_needed(THERE)
    assert set(find_needed([*named - set(LEFT_OUT)])) == set(lacking) | (set(there) & set(find_needed([*named])))
    assert {"ray", "transformers", "deepspeed", "hydra-core", "antlr4-python3-runtime", "rpds-py"} <= set(lacking)
    assert not {"torch", "av", "pytest", "sympy", "opencensus"} & set(lacking)


@pytest.mark.parametrize("file", ["ray/jars/a.jar", "ray/dashboard/client/b.js", "x/tests/y.py", "../../../bin/hf"])
def test_files_that_nothing_asks_for_are_left_out(file: str) -> None:
    assert UNUSED.search(file)


@pytest.mark.parametrize("file", ["ray/_raylet.so", "ray/dashboard/agent.py", "ray/_private/test_utils.py", "a/b.py"])
def test_others_are_kept(file: str) -> None:
    assert not UNUSED.search(file)


@pytest.mark.slow
def test_archives_are_found_by_a_python_without_packages(tmp_path: Path) -> None:
    """The command itself, for small packages: all of them are packed in minutes."""
    command = [str(ROOT / "scripts" / "gpu_bundle.sh"), str(tmp_path / "out"), *THERE, *LARGE]
    done = subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *lines, total = (line.split() for line in done.stdout.splitlines())
    assert int(total[0]) == sum(int(nbytes) for nbytes, _ in lines) < 2e6 and total[1:] == ["of", str(60 << 20)]
    for archive in (tmp_path / "out").glob("*.tar.xz"):
        with tarfile.open(archive) as packed:
            packed.extractall(tmp_path / "site", filter="data")
    bare = "import sys; sys.path = sys.path[:1] + [p for p in sys.path if 'site-packages' not in p]; import antlr4"
    told = f"{bare}; print(antlr4.__file__)"
    found = subprocess.run(
        [sys.executable, "-S", "-c", told], env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True
    )
    assert found.stdout.strip().startswith(str(tmp_path / "site")), found.stderr
