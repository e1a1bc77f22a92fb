"""A run's own fork server: workers find its imports, start as usual without it, and it leaves nothing behind."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dhp.cluster.forks import start_server
from dhp.cluster.forks.fork_client import SERVER
from dhp.cluster.forks.start_server import CLIENT, fork_server, has_gpus, worker_environment

ROOT = Path(__file__).parents[2]
LIMIT_S = 100
MODULE = "wave"  # small, and imported by nobody else here
CODE = f"import json, os, sys; print({MODULE!r} in sys.modules, os.getppid(), json.dumps(sys.path))"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SERVER, raising=False)
    monkeypatch.setattr(start_server, "has_gpus", lambda: False)
    monkeypatch.chdir(ROOT)


def worker(folder: Path, **more: str) -> tuple[str, str]:
    """What a worker prints: whether the module was there, and its parent."""
    found, parent, _ = started(folder, **more)
    return found, parent


def started(folder: Path, **more: str) -> tuple[str, str, list[str]]:
    """The same, and where it looks for modules."""
    script = folder / "default_worker.py"
    script.write_text(CODE)
    done = subprocess.run(
        [sys.executable, CLIENT, script], env={**os.environ, **more}, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    found, parent, path = done.stdout.split(maxsplit=2)
    return found, parent, json.loads(path)


def test_a_worker_is_a_fork_that_finds_the_imports(tmp_path: Path, alone: None) -> None:
    """And looks for the rest where its own environment says, not where the server's does."""
    with fork_server([MODULE, "no.such.module"]):
        folder, deadline = Path(os.environ[SERVER]).parent, time.monotonic() + LIMIT_S
        while not Path(os.environ[SERVER]).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert folder.stat().st_mode & 0o077 == 0
        assert worker_environment() == {"py_executable": f"{sys.executable} {CLIENT}"}
        found, server = worker(tmp_path)
        assert found == "True" and b"dhp.cluster.forks.server" in Path(f"/proc/{server}/cmdline").read_bytes()
        (plugins := tmp_path / "plugins").mkdir()
        found, _, looked = started(tmp_path, PYTHONPATH=str(plugins))
        assert found == "True" and looked[:2] == [str(tmp_path), str(plugins)]
    assert not Path(f"/proc/{server}").exists() and not folder.exists() and worker_environment() is None


def test_a_worker_starts_as_usual_where_no_server_answers(tmp_path: Path, alone: None) -> None:
    assert worker(tmp_path, **{SERVER: str(tmp_path / "nowhere")}) == ("False", str(os.getpid()))
    assert worker(tmp_path) == ("False", str(os.getpid()))


def test_the_environments_own_hook_still_runs(tmp_path: Path, alone: None) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import {MODULE}\n")
    assert worker(tmp_path, PYTHONPATH=str(tmp_path))[0] == "True"


def test_a_killed_run_leaves_neither_server_nor_folder(tmp_path: Path, alone: None) -> None:
    held = "import os, time\nfrom dhp.cluster.forks.start_server import *\nfrom dhp.cluster.forks import start_server\n"
    held += "start_server.has_gpus = lambda: False\n"
    held += f"with fork_server(['{MODULE}']):\n    print(os.environ['{SERVER}'], flush=True)\n    time.sleep(60)"
    run = subprocess.Popen([sys.executable, "-c", held], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    folder = Path(run.stdout.readline().strip()).parent
    run.kill()
    run.wait(LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()


@pytest.mark.parametrize("name", ["nvidia0", "dxg", "kfd", "nvmap"])
def test_beside_gpus_there_is_none(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_gpus(tmp_path)
    (tmp_path / name).touch()
    assert has_gpus(tmp_path)
    monkeypatch.delenv(SERVER, raising=False)
    monkeypatch.setattr(start_server, "has_gpus", lambda: True)
    with fork_server([MODULE]):
        assert SERVER not in os.environ and worker_environment() is None


def late_client(address: Path, then: str) -> subprocess.Popen[str]:
    """A process that hands over, slowly, and then does something where it started as usual."""
    code = "import signal, sys, time\nfrom dhp.cluster.forks import fork_client\nset_handler = signal.signal\n"
    code += "def slow(*given):\n    time.sleep(0.2)\n    return set_handler(*given)\nsignal.signal = slow\n"
    code += f"fork_client.hand_over(sys.argv[1], sys.orig_argv)\n{then}\n"
    return subprocess.Popen([sys.executable, "-c", code, address], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("answer", "status"), [(b"\x07", 7), (b"", 1)], ids=["it ended at once", "it was killed"])
def test_what_a_fork_has_done_is_not_done_again(answer: bytes, status: int, tmp_path: Path) -> None:
    """Though it ended before its client had a word with it."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "server"))
        server.listen()
        client = late_client(tmp_path / "server", "print('again')")
        server.settimeout(LIMIT_S)
        with server.accept()[0] as line, line.makefile("rb") as file:
            assert file.readline() == b"\n" and file.readline().endswith(b"}\n")
            line.sendall(answer)
    assert client.communicate(timeout=LIMIT_S)[0] == "" and client.returncode == status


def test_where_the_server_ends_amid_it_the_worker_starts_as_usual_and_heeds_signals(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "server"))
        server.listen()
        client = late_client(tmp_path / "server", "print(signal.getsignal(15) == signal.SIG_DFL)")
        server.settimeout(LIMIT_S)
        server.accept()[0].close()
    assert client.communicate(timeout=LIMIT_S)[0] == "True\n" and client.returncode == 0
