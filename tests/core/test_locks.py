"""A directory that one run alone may write."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dhp.core import locks
from dhp.core.errors import ConfigError
from dhp.core.locks import LOCK_FILE, locked

HOLDING = """
import sys
from pathlib import Path
from dhp.core.locks import locked
with locked(Path(sys.argv[1]), "run_dir"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT_S", 0.05)


def leave(folder: Path, host: str, pid: int = 7) -> Path:
    """A lock's file, whose holder is not on this host's list of locks."""
    file = folder / LOCK_FILE
    file.write_text(json.dumps({"host": host, "pid": pid, "since": "yesterday"}))
    return file


def test_another_process_that_holds_it_is_told_and_when_killed_is_no_obstacle(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDING, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError) as caught, locked(tmp_path, "run_dir"):
            pass
        told = str(caught.value)
        assert told.startswith(f"run_dir={tmp_path} is in use: process {holder.pid} on host {socket.gethostname()} ")
        assert f"end it (there: kill {holder.pid}), or choose another run_dir" in told
        holder.send_signal(signal.SIGKILL)
    assert (tmp_path / LOCK_FILE).exists()
    with locked(tmp_path, "run_dir"):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_what_it_made_goes_again_when_it_is_empty(tmp_path: Path) -> None:
    with locked(tmp_path / "a" / "b", "run_dir"):
        assert (tmp_path / "a" / "b" / LOCK_FILE).is_file()
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "a" / "b", "run_dir"):
        (tmp_path / "a" / "kept").write_text("")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["kept"]


def test_of_two_in_one_process_the_second_is_refused_too(tmp_path: Path) -> None:
    with locked(tmp_path, "run_dir"):
        with pytest.raises(ConfigError, match="is in use"), locked(tmp_path, "training.checkpoint_dir"):
            pass
        assert (tmp_path / LOCK_FILE).is_file()


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"host": "a"}'])
def test_a_file_that_no_lock_wrote_is_no_obstacle(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK_FILE).write_text(text)
    with locked(tmp_path, "run_dir"):
        pass


def test_a_dead_holder_on_another_host_is_no_obstacle(tmp_path: Path) -> None:
    leave(tmp_path, "elsewhere")
    told: list[str] = []
    with locked(tmp_path, "run_dir", told.append):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["host"] == socket.gethostname()
    last = (
        f"run_dir={tmp_path} was last held by process 7 on host elsewhere: watching for 0.15 s whether that run lives"
    )
    assert told == [last]  # and it does not stand silent meanwhile


def test_where_nothing_is_waited_for_nothing_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    leave(tmp_path, socket.gethostname())
    with locked(tmp_path, "run_dir", told.append):
        pass
    assert told == []


def test_a_living_holder_on_another_host_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = leave(tmp_path, "elsewhere")
    monkeypatch.setattr("time.sleep", lambda _: os.utime(file))
    with pytest.raises(ConfigError, match="process 7 on host elsewhere trains there since yesterday"):
        with locked(tmp_path, "run_dir"):
            pass
    assert json.loads(file.read_text())["pid"] == 7


@pytest.mark.parametrize("alive", [True, False])
def test_without_locks_in_the_file_system_its_touches_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    file = leave(tmp_path, socket.gethostname())
    monkeypatch.setattr("time.sleep", lambda _: os.utime(file) if alive else None)
    if alive:
        with pytest.raises(ConfigError, match="process 7 on host"), locked(tmp_path, "run_dir"):
            pass
    else:
        with locked(tmp_path, "run_dir"):
            pass


def test_a_holder_touches_its_file(tmp_path: Path) -> None:
    with locked(tmp_path, "run_dir"):
        os.utime(tmp_path / LOCK_FILE, (1, 1))
        while (tmp_path / LOCK_FILE).stat().st_mtime == 1:  # ends with the first touch
            pass


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConfigError, match=r"run_dir=.*new cannot be written \(No space left on device\). Make room"):
        with locked(tmp_path / "new", "run_dir"):
            pytest.fail("it is not held")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_made_or_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run_dir=.*/file/below cannot be created"):
        with locked(tmp_path / "file" / "below", "run_dir"):
            pass
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be written"), locked(tmp_path, "run_dir"):
        pass
    assert (tmp_path / "file").read_text() == ""
