"""Compiled graphs that later runs take."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dhp.parallel.kernels.kept_graphs import FOLDER, SETTING, _cpu, keep_graphs

CPU = torch.device("cpu")
KIND = f"{torch.__version__}-cpu-{_cpu()}-{os.getuid()}"
COMPILING = """import json, sys
from pathlib import Path
import torch
from dhp.parallel.kernels.kept_graphs import keep_graphs
assert keep_graphs(Path(sys.argv[1]), torch.device("cpu")) is None
found = torch.compile(lambda values: values * 2 + 1)(torch.arange(4.0))
counts = torch._dynamo.utils.counters
print(json.dumps([found.tolist(), counts["inductor"]["fxgraph_cache_hit"], counts["inductor"]["fxgraph_cache_miss"]]))
"""


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "")


def compiled(folder: Path) -> list[object]:
    """What a process computes that compiles, and how many graphs it takes from the disk and makes."""
    command = [sys.executable, "-c", COMPILING, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_they_are_compiled_once_and_anew_where_they_are_broken(tmp_path: Path) -> None:
    assert compiled(tmp_path) == [[1.0, 3.0, 5.0, 7.0], 0, 1]
    assert compiled(tmp_path) == [[1.0, 3.0, 5.0, 7.0], 1, 0]
    graphs = [file for file in tmp_path.rglob("fxgraph/**/*") if file.is_file()]
    assert graphs
    for file in graphs:
        file.write_bytes(b"broken")
    found, taken, _ = compiled(tmp_path)
    assert (found, taken) == ([1.0, 3.0, 5.0, 7.0], 0)


def test_each_user_version_and_kind_of_device_has_a_folder_that_no_other_may_enter(tmp_path: Path) -> None:
    assert keep_graphs(tmp_path, CPU) is None
    kept = tmp_path / FOLDER / KIND
    assert os.environ[SETTING] == str(kept) and kept.stat().st_mode & 0o777 == 0o700


def test_the_users_setting_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "/theirs")
    assert keep_graphs(tmp_path, CPU) is None and os.environ[SETTING] == "/theirs" and not list(tmp_path.iterdir())


def _writable(kept: Path, _: pytest.MonkeyPatch) -> None:
    kept.mkdir()
    kept.chmod(0o777)


def _linked(kept: Path, _: pytest.MonkeyPatch) -> None:
    kept.symlink_to(kept.parent)


def _of_another(kept: Path, patch: pytest.MonkeyPatch) -> None:
    kept.mkdir(mode=0o700)
    own = Path.lstat
    owned = lambda about: os.stat_result([*about[:4], 12345, *about[5:10]])
    patch.setattr(Path, "lstat", lambda path: owned(own(path)) if path == kept else own(path))


def _exchanged(kept: Path, _: pytest.MonkeyPatch) -> None:
    kept.parent.chmod(0o777)


def _file(kept: Path, _: pytest.MonkeyPatch) -> None:
    kept.write_text("")


REFUSALS = [
    (_writable, "others may write"),
    (_linked, "others may write"),
    (_of_another, "others may write"),
    (_exchanged, "others may exchange it"),
    (_file, "File exists"),
]


@pytest.mark.parametrize(("make", "said"), REFUSALS)
def test_what_others_may_have_put_there_is_not_run(
    make: Callable[[Path, pytest.MonkeyPatch], None], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FOLDER).mkdir()
    make(tmp_path / FOLDER / KIND, monkeypatch)
    refused = keep_graphs(tmp_path, CPU)
    assert refused is not None and said in refused and "anew in each run" in refused
    assert os.environ[SETTING] == ""
