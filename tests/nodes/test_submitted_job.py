"""Jobs that are submitted, tokens, GPUs of nodes."""

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
import torch

from dhp.cluster.cluster import Cluster, ClusterSpec
from dhp.cluster.hangs.watch import wait_all
from dhp.core.axes import Degrees
from dhp.core.errors import ConfigError
from tests.helpers.graphs import make_graph
from tests.helpers.marks import MARK, marked_processes
from tests.helpers.runs import ONE_ACTOR_EACH, ROOT, tiny
from tests.nodes.conftest import ADDRESSES

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


ATTACH = """
import sys
from dhp.cluster.ray_session import ray_session
from dhp.core.errors import ConfigError
try:
    with ray_session(sys.argv[1], cpus=0):
        print("let in")
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_without_a_token_one_is_told_what_is_missing(two_nodes: str, tmp_path: Path) -> None:
    without = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token", "PYTHONPATH": str(Path(__file__).parents[2])}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH")} | without
    command = [sys.executable, "-c", ATTACH, two_nodes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"cluster.address={two_nodes}: something listens there, but a connection to Ray failed" in done.stdout
    assert "RAY_AUTH_MODE=token" in done.stdout


WAIT_S = 600.0


def layout(address: str, folder: Path, data: int, tensor: int) -> ClusterSpec:
    graph = make_graph(Degrees(data=data * tensor), Degrees(data=data, tensor=tensor))
    folders = (str(folder / "logs"), str(folder))
    return ClusterSpec(graph, "cuda", address, 1, WAIT_S, WAIT_S, *folders)


@pytest.mark.usefixtures("recwarn")
@pytest.mark.slow
def test_a_tensor_group_of_four_does_not_fit_into_nodes_of_two(two_nodes: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Cluster(layout(two_nodes, tmp_path, 1, 4)).__enter__()
    told, (first, second) = str(caught.value), ADDRESSES
    assert f"of text.tensor=4 lie across nodes: ranks 0, 1, 2, 3 on {first} and {second}. " in told
    assert "text, split by data 1, ring 1, ulysses 1, tensor 4, would" in told and "set text.tensor=2, or" in told
    assert told.endswith(f"The nodes: {first} has 2 GPUs, {second} has 2 GPUs")


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="the torch here is built for CUDA")
def test_each_rank_looks_at_its_own_node_before_anything_is_loaded(two_nodes: str, tmp_path: Path) -> None:
    with Cluster(layout(two_nodes, tmp_path, 1, 2)) as cluster:
        cluster.groups["text"].start(os.getcwd)
        with pytest.raises(
            ConfigError, match=r"^node 127\.0\.0\.[23], where text rank \d runs: .* built for CPUs alone"
        ):
            wait_all(cluster.groups["text"].take_watched(), WAIT_S)
