"""Two nodes on this machine train together; one of them is killed, and the run goes on with the device that is left."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

KILLED_AFTER = 12  # steps
STEPS = 30


def main(run_dir: Path, overrides: list[str]) -> int:
    """Exit status of the run. run_dir: a new directory. overrides: of its configuration."""
    # Whoever has the token may run commands on the cluster: it is in the environment of these processes alone.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    from ray.cluster_utils import Cluster  # Ray reads the two as it is imported

    cluster = Cluster(
        initialize_head=True, head_node_args={"node_ip_address": "127.0.0.2", "num_cpus": 1, "include_dashboard": False}
    )
    try:
        other = cluster.add_node(node_ip_address="127.0.0.3", num_cpus=1)
        run = subprocess.Popen([*command(cluster.address, run_dir), *overrides])
        while run.poll() is None and count_steps(run_dir) < KILLED_AFTER:
            time.sleep(0.1)
        print(f"--- after step {KILLED_AFTER}: the node 127.0.0.3 is killed", flush=True)
        cluster.remove_node(other, allow_graceful=False)
        return run.wait()
    finally:
        cluster.shutdown()


def command(address: str, run_dir: Path) -> list[str]:
    """A run over both nodes: two decoder actors that share each matrix, and a layout for the case that one is left."""
    return [
        *(sys.executable, "-m", "dhp.train_ray", "--config-name=tiny", f"run_dir={run_dir}"),
        *(f"cluster.address={address}", f"training.max_steps={STEPS}", "training.save_steps=5"),
        *("training.log_interval=5", "vision.num_actors=1", "vision.parallelism=none", "vision.zero_stage=0"),
        *("training.max_restarts=3", "training.elastic_wait_s=3"),
        "training.elastic=['text.num_actors=1 text.parallelism=none']",
    ]


def count_steps(run_dir: Path) -> int:
    """Steps that are in metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def losses(run_dir: Path) -> list[float]:
    """The loss of each step."""
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/two-nodes"), sys.argv[2:]))
