"""Runs over two nodes, faults and hangs among them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dhp.cluster.cluster import ActorGroup
from dhp.cluster.hangs import watch
from dhp.cluster.hangs.lookout import Lookout
from dhp.cluster.hangs.watch import asking, require_answers, wait_all
from dhp.cluster.placement.nodes import read_nodes, this_node
from dhp.cluster.placement.reservation import bundle_nodes, find_topology, plan_placement, reserve
from dhp.cluster.worker import GroupSettings
from dhp.core.dispatch import per_rank
from dhp.core.errors import HUNG, LOST, ClusterError, Fault, PartFailed
from examples.two_nodes.two_nodes import KILLED_AFTER, STEPS, command, losses
from tests.cluster.hangs.test_lookout import Trainer
from tests.helpers import forks
from tests.helpers.runs import FIRST, LONG, ROOT, Outcome, tiny, train, wait_for_steps
from tests.nodes.conftest import ADDRESSES

FIELDS = ("loss", "grad_norm", "tokens", "lr")


def lines(run_dir: Path) -> list[list[object]]:
    told = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [[line[field] for field in FIELDS] for line in told if line["kind"] == "train"]


@pytest.mark.slow
def test_two_nodes_train_what_one_does(
    long_run: tuple[Path, Outcome], two_nodes: str, long_assets: Path, tmp_path: Path
) -> None:
    one, two = long_run[0], tmp_path / "two"
    apart = ["cluster.collocate=false", f"cluster.address={two_nodes}", "data.num_workers=2"]
    outcome = train(*tiny(long_assets, two, *LONG, *apart))
    assert outcome.status == 0, outcome.stderr
    first, second = ADDRESSES
    assert f"on nodes {first} (vision 0-1), {second} (text 0-1)" in outcome.stdout
    assert "lie across nodes" not in outcome.stderr
    assert f"data workers run on {first}, {second}" in outcome.stdout
    for rank in (0, 1):
        assert (two / "logs" / f"vision-{rank}.log").read_text().startswith(f"vision rank {rank} on {first}; ")
        assert (two / "logs" / f"text-{rank}.log").read_text().startswith(f"text rank {rank} on {second}; ")
    saved = [sorted(path.name for path in (run_dir / "checkpoints").iterdir()) for run_dir in (one, two)]
    assert saved[0] == saved[1] and "step_4" in saved[0]
    assert long_run[1].status == 0, long_run[1].stderr
    assert lines(two) == lines(one)
    summary = json.loads((two / "summary.json").read_text())
    assert summary["status"] == "completed"


ELASTIC_STEPS = 60
SETTINGS = (f"training.max_steps={ELASTIC_STEPS}", "training.save_steps=10", *FIRST[1:])
# Each step has two rows, so of three replicas one has none. All on three nodes of one CPU each.
THREE = (
    *("vision.num_actors=1", "vision.parallelism=none", "vision.zero_stage=0", "training.empty_rows=true"),
    *("text.num_actors=3", "text.parallelism=data"),
)
TWO, ONE = "text.num_actors=2 text.parallelism=tensor", "text.num_actors=1 text.parallelism=none"
ELASTIC = (
    *("training.max_restarts=3", "training.restart_wait_s=0.1", "training.elastic_wait_s=3"),
    f"training.elastic=['{ONE}','{TWO}']",
)


@contextmanager
def heads(cpus: int = 2) -> Iterator[Any]:
    """A cluster of a head."""
    from ray.cluster_utils import Cluster

    from dhp.cluster.ray_session import session_token

    with session_token(), forks.of_rays_here():
        made = Cluster(
            initialize_head=True,
            head_node_args={"node_ip_address": "127.0.0.4", "num_cpus": cpus, "include_dashboard": False},
        )
        try:
            yield made
        finally:
            made.shutdown()


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head with one CPU."""
    with heads(1) as made:
        yield made


def elastic_lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def wait_for_verdict(run_dir: Path, number: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not (run_dir / "faults" / f"{number:03}.json").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.grid  # a driver whose control store is gone ends after a minute
def test_the_head_goes_and_the_command_is_run_again(tiny_assets: Path, tmp_path: Path) -> None:
    plain, run_dir = tmp_path / "plain", tmp_path / "run"
    assert train(*tiny(tiny_assets, plain, *SETTINGS)).status == 0
    again = ("training.max_restarts=1", "training.restart_wait_s=0.1")
    with heads() as first:

        def kill(process: subprocess.Popen[str]) -> None:
            wait_for_steps(run_dir, 12, process)
            first.head_node.kill_gcs_server(check_alive=False)
            first.head_node.kill_raylet(check_alive=False)

        arguments = tiny(tiny_assets, run_dir, *SETTINGS, *again)
        lost = train(*arguments, f"cluster.address={first.address}", meanwhile=kill)
    assert lost.status == 1 and lost.left == ()
    assert json.loads((run_dir / "faults" / "002.json").read_text())["kind"] == "no cluster"
    with heads() as second:
        found = train(*arguments, f"cluster.address={second.address}", "training.resume=auto")
    assert found.status == 0, found.stderr
    keys = ("loss", "grad_norm", "sample_digest")
    assert [[line[key] for key in keys] for line in elastic_lines(run_dir)] == [
        [line[key] for key in keys] for line in elastic_lines(plain)
    ]


@pytest.mark.slow
def test_a_node_goes_and_another_comes(cluster: Any, tiny_assets: Path, tmp_path: Path) -> None:
    plain, run_dir = tmp_path / "plain", tmp_path / "run"
    undisturbed = train(*tiny(tiny_assets, plain, *SETTINGS, *THREE))
    assert undisturbed.status == 0, undisturbed.stderr
    node = cluster.add_node(node_ip_address="127.0.0.5", num_cpus=1)
    cluster.add_node(node_ip_address="127.0.0.7", num_cpus=1)

    def disturb(process: subprocess.Popen[str]) -> None:
        wait_for_steps(run_dir, 12, process)
        cluster.remove_node(node, allow_graceful=False)
        wait_for_verdict(run_dir, 2, process)
        cluster.add_node(node_ip_address="127.0.0.6", num_cpus=1)

    arguments = tiny(tiny_assets, run_dir, *SETTINGS, *THREE, *ELASTIC, f"cluster.address={cluster.address}")
    found: Outcome = train(*arguments, meanwhile=disturb)
    assert found.status == 0, found.stderr
    verdicts = [json.loads(file.read_text()) for file in sorted((run_dir / "faults").iterdir())]
    kinds = [verdict["kind"] for verdict in verdicts]
    assert kinds[1:] == ["fewer devices", "more devices", "completed"] and kinds[0] in ("lost", "died", "raised")
    assert (verdicts[1]["devices"], verdicts[2]["devices"]) == (2, 3)
    assert f"training.elastic: with 2 of 3 devices, {TWO}" in found.stdout
    assert verdicts[1]["followed_by"].endswith(f", in the layout {TWO}")
    assert "restart, not counted, for it goes on in another layout" in found.stdout
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["world"]["text"]["data"] == 3
    ours, theirs = elastic_lines(run_dir), elastic_lines(plain)
    assert [line["sample_digest"] for line in ours] == [line["sample_digest"] for line in theirs]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-5)


WALK = ROOT / "examples" / "two_nodes"


@pytest.mark.slow
def test_the_run_survives_its_node(tiny_assets: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with forks.of_rays_here():
        done = subprocess.run(
            [sys.executable, str(WALK / "two_nodes.py"), str(run_dir), f"tiny_assets={tiny_assets}"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=600,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"after step {KILLED_AFTER}: the node 127.0.0.3 is killed" in done.stdout
    verdicts = [json.loads(file.read_text()) for file in sorted((run_dir / "faults").iterdir())]
    assert verdicts[-1]["kind"] == "completed" and verdicts[0]["kind"] in ("lost", "died", "raised")
    assert any("in the layout text.num_actors=1" in verdict["followed_by"] for verdict in verdicts)
    assert (run_dir / "report.html").exists()
    plain = tmp_path / "plain"
    settings = [one for one in command("local", plain)[3:] if not one.startswith(("training.elastic", "cluster"))]
    assert train(*settings, f"tiny_assets={tiny_assets}").status == 0
    assert losses(run_dir) == pytest.approx(losses(plain), rel=1e-5) and len(losses(plain)) == STEPS


def test_the_page_has_the_keys_of_the_script() -> None:
    page, given = (WALK / "README.md").read_text(), " ".join(command("x", Path("y")))
    for key, value in re.findall(r"^\| `(training\.\w+)` \| `?([^|`]+?)`? \|", page, re.MULTILINE):
        assert f"{key}={value}" in given or f"{key}=['{value}']" in given


WAIT_S = 600.0
RANKS = 3


@pytest.fixture
def lost() -> Iterator[Any]:
    """A cluster of its own, of two nodes, for it does not outlive the test."""
    from ray.cluster_utils import Cluster

    from dhp.cluster.ray_session import ray_session, session_token

    size = {"num_cpus": 2, "num_gpus": 2, "include_dashboard": False}
    with session_token(), forks.of_rays_here():
        cluster = Cluster(initialize_head=True, head_node_args={"node_ip_address": ADDRESSES[0], **size})
        try:
            second = cluster.add_node(node_ip_address=ADDRESSES[1], **size)
            with ray_session(cluster.address, cpus=0):
                yield cluster, second
        finally:
            cluster.shutdown()


def start(logs: Path) -> tuple[ActorGroup, Lookout]:
    plan = plan_placement({"text": range(RANKS)}, gpus=4)
    reserved = reserve(plan, WAIT_S)
    topology = find_topology(bundle_nodes(reserved), read_nodes())
    slots = plan.slots["text"]
    lookout = Lookout(60.0, str(logs), this_node(), {node.id: node.name for node in topology.nodes})
    settings = GroupSettings("text", RANKS, "gloo", 1, WAIT_S, None, False)
    group = ActorGroup(settings, slots, reserved, topology.names(slots), lookout)
    group.start(Trainer)
    wait_all(group.take_watched(), WAIT_S)
    return group, lookout


def failure(group: ActorGroup, seconds: list[float]) -> PartFailed:
    group.execute_all_async("forward_step", 0, per_rank(seconds), returns=0)
    with pytest.raises(PartFailed) as caught:
        wait_all(group.take_watched(), WAIT_S)
    return caught.value


@pytest.mark.slow
def test_each_fault_of_another_node_is_named(lost: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, second = lost
    group, lookout = start(tmp_path)
    pids = [rank["pid"] for rank in group.execute_all("about", timeout_s=WAIT_S)]
    far = [rank for rank, node in enumerate(group._nodes) if node == ADDRESSES[1]][0]
    lookout.look()  # its actor is there by now
    lookout.collective_s = 4.0

    error = failure(group, [8.0 if rank == far else 0.0 for rank in range(RANKS)])
    assert str(error).startswith(f"text rank {far} on node {ADDRESSES[1]} did not enter a collective in which text ")
    assert f"\n  text-{far}: in forward_step (" in str(error)  # its stacks, though it has no logs
    assert "in forward_step" in (tmp_path / f"text-{far}.stacks").read_text()
    assert error.fault == Fault(HUNG, f"text rank {far}", "forward_step", ADDRESSES[1])
    lookout.collective_s = 60.0
    group.execute_all("about", timeout_s=WAIT_S)

    os.kill(pids[far], signal.SIGSTOP)
    lookout.collective_s = 4.0
    error = failure(group, [0.0] * RANKS)
    os.kill(pids[far], signal.SIGCONT)
    assert f"text rank {far} on node {ADDRESSES[1]}: is stopped (SIGSTOP or a debugger; `kill -CONT " in str(error)
    assert error.fault == Fault(HUNG, f"text rank {far}", "forward_step", ADDRESSES[1])
    lookout.collective_s = 60.0
    group.execute_all("about", timeout_s=WAIT_S)

    monkeypatch.setattr(watch, "_EVERY_S", 0.2)
    monkeypatch.setattr(watch, "_ANSWER_S", 1.0)
    gcs = psutil.Process(cluster.head_node.all_processes["gcs_server"][0].process.pid)
    with asking():
        require_answers()
        gcs.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(ClusterError, match="has not answered 6 questions in a row, each within 1 s"):
            wait_all(later(group), WAIT_S)
        assert time.monotonic() - begun < 30
        gcs.send_signal(signal.SIGCONT)
    group.execute_all("about", timeout_s=WAIT_S)

    waiting = later(group)
    cluster.remove_node(second, allow_graceful=False)
    with pytest.raises(PartFailed) as caught:
        wait_all(waiting, WAIT_S)
    assert str(caught.value).startswith(f"node {ADDRESSES[1]} was lost, or cannot be reached, and text rank ")
    assert (caught.value.fault.kind, caught.value.fault.node) == (LOST, ADDRESSES[1])
    lookout.stop()


def later(group: ActorGroup) -> Any:
    group.execute_all_async("forward_step", 0, per_rank([15.0] * RANKS), returns=0)
    return group.take_watched()
