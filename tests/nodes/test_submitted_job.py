"""A run handed to a cluster by `ray job submit`, as README.md says: real `ray start`, job server, token and ports."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.helpers.marks import MARK, marked_processes
from tests.helpers.runs import ONE_ACTOR_EACH, ROOT, tiny

ADDRESS = "127.0.0.4"  # a node of its own on loopback
RAY = str(Path(sys.executable).with_name("ray"))
LIMIT_S = 300  # against hangs


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((ADDRESS, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def ray(*words: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RAY, *words], env=environment, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment in which `ray job` finds a cluster with a job server, and has its token."""
    port, dashboard, agent, client = free_ports(4)
    folder, mark = tempfile.mkdtemp(prefix="dhp-job-", dir="/tmp"), uuid4().hex  # sockets' paths are to be short
    own = {
        MARK: mark,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_TMPDIR": folder,
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "no_proxy": f"127.0.0.1,localhost,{ADDRESS}",
    }
    environment = {**{name: value for name, value in os.environ.items() if not name.startswith("RAY_")}, **own}
    start = ["start", "--head", "--block", "--disable-usage-stats", "--num-cpus=2", f"--node-ip-address={ADDRESS}"]
    start += [f"--port={port}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    start += [f"--ray-client-server-port={client}"]
    with open(Path(folder) / "head.log", "w") as log:
        head = subprocess.Popen([RAY, *start], env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + LIMIT_S
        while ray("job", "list", environment=environment).returncode:
            assert head.poll() is None and time.monotonic() < deadline, (Path(folder) / "head.log").read_text()
            time.sleep(0.5)
        yield environment
    finally:
        head.terminate()
        head.wait(LIMIT_S)
        for pid in marked_processes(mark):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_submitted_run_trains_on_the_cluster_that_it_was_submitted_to(
    cluster: dict[str, str], tiny_assets: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = tiny(tiny_assets, run_dir, *ONE_ACTOR_EACH, "training.max_steps=2", "training.log_interval=1")
    done = ray(
        *("job", "submit", "--working-dir", str(ROOT), "--", "python", "-m", "dhp.train_ray", *words),
        environment=cluster,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert re.search(r"Job 'raysubmit_\w+' .*succeeded", said)
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if line["kind"] == "train"] == [1, 2]
    assert (run_dir / "checkpoints" / "step_2").is_dir()
    assert (run_dir / "logs").is_dir()
    assert "cluster.address" not in " ".join(words)
    drivers = list((Path(cluster["RAY_TMPDIR"]) / "ray" / "session_latest" / "logs").glob("job-driver-raysubmit_*.log"))
    assert len(drivers) == 1 and "saving the final checkpoint" in drivers[0].read_text()


@pytest.mark.slow
def test_the_job_server_asks_for_the_token(cluster: dict[str, str]) -> None:
    refused = ray("job", "list", environment={**cluster, "RAY_AUTH_TOKEN": "0" * 64})
    assert refused.returncode != 0
    assert "token authentication is enabled" in refused.stdout + refused.stderr
    assert ray("job", "list", environment=cluster).returncode == 0  # or nothing was asked
