"""A run whose node goes away goes on with the devices that are left, and with all of them when there are more again."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import forks
from tests.helpers.runs import FIRST, Outcome, tiny, train, wait_for_steps

STEPS = 60
SETTINGS = (f"training.max_steps={STEPS}", "training.save_steps=10", *FIRST[1:])
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

    from dhp.cluster.ray_session import own_token

    with own_token(), forks.of_rays_here():
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


def lines(run_dir: Path) -> list[dict[str, Any]]:
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
    assert [[line[key] for key in keys] for line in lines(run_dir)] == [
        [line[key] for key in keys] for line in lines(plain)
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
    ours, theirs = lines(run_dir), lines(plain)
    assert [line["sample_digest"] for line in ours] == [line["sample_digest"] for line in theirs]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-5)
