"""A temporary folder of one process."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dhp.core.files import base_for_socket, private_folder

HOLDING = """
import sys
from dhp.core.files import private_folder
with private_folder("dhp-test-") as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield tmp_path


def test_it_is_removed_at_the_end(temporary: Path) -> None:
    with pytest.raises(ValueError), private_folder("dhp-test-") as folder:
        assert folder.parent == temporary and folder.name.startswith("dhp-test-")
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "file").touch()
        raise ValueError
    assert list(temporary.iterdir()) == []


def test_of_a_living_process_it_stays_and_of_a_killed_one_it_goes(temporary: Path) -> None:
    holding = [sys.executable, "-c", HOLDING]
    process = subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    other = Path(process.stdout.readline().strip())
    with private_folder("dhp-test-") as mine, private_folder("dhp-test-") as again:
        assert other.is_dir() and mine.is_dir() and again.is_dir()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (other / "file").exists()
    with private_folder("dhp-other-"):
        assert other.is_dir()
    with private_folder("dhp-test-") as folder:
        assert list(temporary.iterdir()) == [folder]


def test_a_link_of_that_name_is_not_followed(temporary: Path) -> None:
    target = temporary / "target"
    target.mkdir()
    (target / "file").touch()
    os.symlink(target, temporary / "dhp-test-link")
    with private_folder("dhp-test-"):
        pass
    assert (target / "file").exists() and (temporary / "dhp-test-link").is_symlink()


def test_a_socket_has_a_path_that_is_short_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    assert base_for_socket(str(tmp_path), "/s") == str(tmp_path) and base_for_socket(str(deep), "/s" * 9) == "/tmp"
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with private_folder("dhp-test-", "server") as folder, closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(folder / "server"))
        assert folder.parent == Path("/tmp")
