"""The servers of a run's own Ray: their death is named, what they leave is ended, and no teardown hangs on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dhp.cluster import servers
from dhp.cluster.servers import descendants, has_ended, limited_teardown, own_servers, require_servers
from dhp.core.errors import ClusterError
from tests.helpers.runs import ROOT


@pytest.fixture
def raylet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process of that name, with one of its own that survives it."""
    monkeypatch.setattr(servers, "LEFT_S", 0.2)
    monkeypatch.setattr(servers, "CHECK_S", 0.0)
    program = tmp_path / "raylet"
    program.write_text("#!/bin/sh\nsetsid sleep 600 &\necho ready\nwait\n")
    program.chmod(0o755)
    process = subprocess.Popen([str(program)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def others(raylet: subprocess.Popen[str]) -> list[int]:
    own = {raylet.pid, *(child.pid for child in psutil.Process(raylet.pid).children(recursive=True))}
    return [process.pid for process in descendants() if process.pid not in own]


def test_a_server_that_ends_is_named(raylet: subprocess.Popen[str], tmp_path: Path) -> None:
    require_servers(at_once=True)  # there is none
    with own_servers(others(raylet), tmp_path):
        require_servers()
        raylet.send_signal(signal.SIGKILL)
        raylet.wait()
        with pytest.raises(
            ClusterError, match=rf"Ray's raylet \(its server of this node, process {raylet.pid}\) ended"
        ):
            require_servers()
    require_servers(at_once=True)


def stop(raylet: subprocess.Popen[str]) -> None:
    raylet.send_signal(signal.SIGSTOP)
    os.waitpid(raylet.pid, os.WUNTRACED)


def test_a_server_that_is_stopped_for_too_long_is_named(
    raylet: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_servers(others(raylet), tmp_path):
        monkeypatch.setattr(servers, "STOPPED_S", 60.0)
        stop(raylet)
        require_servers()
        assert set(servers._Own.stopped) == {"raylet"}
        raylet.send_signal(signal.SIGCONT)
        os.waitpid(raylet.pid, os.WCONTINUED)
        require_servers()
        assert not servers._Own.stopped  # it goes on: the time before does not count
        stop(raylet)
        monkeypatch.setattr(servers, "STOPPED_S", 0.3)
        require_servers()
        with pytest.raises(ClusterError, match="stopped"):  # where a hang is looked into, at once
            require_servers(at_once=True, stopped_s=0.0)
        time.sleep(0.4)
        with pytest.raises(ClusterError) as caught:
            require_servers()
        said = f"Ray's raylet (its server of this node, process {raylet.pid}) has been stopped for 1 s"
        assert str(caught.value).startswith(said) and f"`kill -CONT {raylet.pid}`" in str(caught.value)
        with limited_teardown(None):  # it would not answer
            raylet.wait(60)


def test_what_servers_leave_is_ended(raylet: subprocess.Popen[str], tmp_path: Path) -> None:
    (left,) = psutil.Process(raylet.pid).children(recursive=True)
    with own_servers(others(raylet), tmp_path):
        raylet.kill()
        assert not has_ended(left)
    left.wait(60)
    assert has_ended(left)


def test_a_teardown_that_waits_for_ray_goes_on_once_its_processes_are_killed(
    raylet: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "TEARDOWN_S", 0.1)
    with own_servers(others(raylet), tmp_path), limited_teardown(None):
        raylet.wait(60)
    assert "Ray has not ended in 0.1 s: killing its processes" in capsys.readouterr().err


def test_a_teardown_in_time_is_left_alone(raylet: subprocess.Popen[str], tmp_path: Path) -> None:
    with own_servers(others(raylet), tmp_path):
        with limited_teardown(None):
            pass
        assert raylet.poll() is None
    assert not [thread for thread in threading.enumerate() if thread.name == "teardown"]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [("None", 0, ""), ("KeyboardInterrupt()", 130, ""), ("PartFailed('it died')", 1, "\nPartFailed: it died\n")],
)
def test_a_teardown_that_hangs_for_good_ends_the_process(error: str, status: int, said: str) -> None:
    code = (
        "import time\nfrom dhp.cluster import servers\nfrom dhp.core import process\n"
        "from dhp.core.errors import PartFailed\nprocess.begin_command()\n"
        f"servers.TEARDOWN_S, servers.FORCED_S = 0.1, 0.1\n"
        f"with servers.limited_teardown({error}):\n    time.sleep(600)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    assert f"Ray's shutdown hangs: this process ends without it{said}" in done.stderr
