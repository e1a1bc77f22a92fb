"""A run's own fork server: workers find its imports, start as usual without it, and it leaves nothing behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dhp.cluster.forks.fork_client import REFUSED, SERVER
from dhp.cluster.forks.server import _receive
from dhp.cluster.forks.start_server import CLIENT, fork_server, worker_environment

ROOT = Path(__file__).parents[2]
LIMIT_S = 100
MODULE = "wave"  # small, and imported by nobody else here
CODE = f"import json, os, sys; print({MODULE!r} in sys.modules, os.getppid(), json.dumps(sys.path))"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SERVER, raising=False)
    monkeypatch.chdir(ROOT)


def listening() -> Path:
    """The server's address, once it is there."""
    address, deadline = Path(os.environ[SERVER]), time.monotonic() + LIMIT_S
    while not address.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return address


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
        folder = listening().parent
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
    held = "import os, time\nfrom dhp.cluster.forks.start_server import *\n"
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


ASKING = """import torch
torch.cuda._is_compiled = lambda: True
torch.cuda._is_in_bad_fork = lambda: {asked}
torch.cuda._device_count_nvml = lambda: 1
torch._C._cuda_getDeviceCount = lambda: {counted}
"""


@pytest.mark.parametrize(
    ("asked", "counted"), [(True, 1), (False, 0), (False, 1)], ids=["by torch", "past torch", "not"]
)
def test_where_an_import_has_asked_the_gpus_driver_workers_start_as_usual(
    asked: bool, counted: int, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asking.py").write_text(ASKING.format(asked=asked, counted=counted))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with fork_server([MODULE, "asking"]):
        listening()
        found, parent = worker(tmp_path)
    assert (found, parent == str(os.getpid())) == (("True", False) if not asked and counted else ("False", True))


@pytest.mark.parametrize("gpus", [True, False])
def test_imports_count_gpus_without_their_driver(gpus: bool, tmp_path: Path, alone: None) -> None:
    with fork_server([MODULE], gpus=gpus):
        listening()
        server = Path("/proc", worker(tmp_path)[1], "environ").read_bytes().split(b"\0")
    assert b"PYTORCH_NVML_BASED_CUDA_CHECK=1" in server and (b"CUDA_VISIBLE_DEVICES=" in server) == (not gpus)


@pytest.mark.parametrize(
    ("own", "told"), [({}, b"0"), ({"GOMP_SPINCOUNT": "7"}, b"7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_of_parts_that_share_cores_do_not_wait_in_a_loop(
    own: dict[str, str], told: bytes | None, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user has said how threads wait."""
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    with fork_server([MODULE], gpus=False, sharing=True):
        listening()
        server = Path("/proc", worker(tmp_path)[1], "environ").read_bytes().split(b"\0")
    assert [one for one in server if one.startswith(b"GOMP_SPINCOUNT=")] == (
        [] if told is None else [b"GOMP_SPINCOUNT=" + told]
    )


def late_client(address: Path, then: str) -> subprocess.Popen[str]:
    """A process that hands over, slowly, and then does something where it started as usual."""
    code = "import signal, sys, time\nfrom dhp.cluster.forks import fork_client\nset_handler = signal.signal\n"
    code += "def slow(*given):\n    time.sleep(0.2)\n    return set_handler(*given)\nsignal.signal = slow\n"
    code += f"fork_client.hand_over(sys.argv[1], sys.orig_argv)\n{then}\n"
    return subprocess.Popen([sys.executable, "-c", code, address], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@contextmanager
def handed_over(folder: Path, then: str) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """Such a process whose start has come to a server, and the server's end of their line."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "server"))
        server.listen()
        client = late_client(folder / "server", then)
        server.settimeout(LIMIT_S)
        with server.accept()[0] as line, line.makefile("rb", buffering=0) as file:
            assert file.readline() == b"\n" and file.readline().endswith(b"}\n")
            yield client, line


@pytest.mark.parametrize(("answer", "status"), [(b"\x07", 7), (b"", 1)], ids=["it ended at once", "it was killed"])
def test_what_a_fork_has_done_is_not_done_again(answer: bytes, status: int, tmp_path: Path) -> None:
    """Though it ended before its client had a word with it."""
    with handed_over(tmp_path, "print('again')") as (client, line):
        line.sendall(answer)
    assert client.communicate(timeout=LIMIT_S)[0] == "" and client.returncode == status


def test_signals_that_come_with_a_workers_start_are_left_for_its_fork() -> None:
    """As where the server still imports."""
    ends = socket.socketpair()
    with ends[0] as client, ends[1] as line:
        client.sendmsg([b"\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [0, 1, 2]))])
        client.sendall(b'{"words": []}\n' + bytes([signal.SIGTERM]))
        start, streams = _receive(line)
        assert start == {"words": []} and line.recv(64) == bytes([signal.SIGTERM])
        for number in streams:
            os.close(number)


def test_where_the_server_refuses_the_worker_starts_as_usual_and_heeds_signals(tmp_path: Path) -> None:
    with handed_over(tmp_path, "print('usual')") as (client, line):
        client.send_signal(signal.SIGTERM)  # while it waits for the answer
        assert line.recv(1) == bytes([signal.SIGTERM])
        line.sendall(REFUSED)
    assert client.communicate(timeout=LIMIT_S)[0] == "" and client.returncode == -signal.SIGTERM


def test_where_the_server_ends_amid_it_the_worker_starts_as_usual_and_heeds_signals(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "server"))
        server.listen()
        client = late_client(tmp_path / "server", "print(signal.getsignal(15) == signal.SIG_DFL)")
        server.settimeout(LIMIT_S)
        server.accept()[0].close()
    assert client.communicate(timeout=LIMIT_S)[0] == "True\n" and client.returncode == 0
