"""A rank on another node that hangs or is stopped, that node killed, Ray's control store stopped: each is named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dhp.cluster.cluster import ActorGroup
from dhp.cluster.hangs import watch
from dhp.cluster.hangs.lookout import Lookout
from dhp.cluster.hangs.watch import asking, require_answers, wait_all
from dhp.cluster.placement.nodes import own_node, read_nodes
from dhp.cluster.placement.reservation import bundle_nodes, find_topology, plan_placement, reserve
from dhp.cluster.worker import GroupSettings
from dhp.core.dispatch import per_rank
from dhp.core.errors import HUNG, LOST, ClusterError, Fault, PartFailed
from tests.cluster.hangs.test_lookout import Trainer
from tests.helpers import forks
from tests.nodes.conftest import ADDRESSES

WAIT_S = 600.0
RANKS = 3


@pytest.fixture
def lost() -> Iterator[Any]:
    """A cluster of its own, of two nodes, for it does not outlive the test."""
    from ray.cluster_utils import Cluster

    from dhp.cluster.ray_session import own_token, ray_session

    size = {"num_cpus": 2, "num_gpus": 2, "include_dashboard": False}
    with own_token(), forks.of_rays_here():
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
    lookout = Lookout(60.0, str(logs), own_node(), {node.id: node.name for node in topology.nodes})
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
