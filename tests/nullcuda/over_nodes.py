"""A run on a Ray of several nodes on this machine: `python -m tests.nullcuda.over_nodes NODES GPUS command …`.

GPUS: of each node. The command is told the cluster's address as `cluster.address=`."""

import subprocess
import sys

FIRST = 21  # of the addresses 127.0.0.N


def main(nodes: int, gpus: int, command: list[str]) -> int:
    """The command's status."""
    from ray.cluster_utils import Cluster

    from dhp.cluster.ray_session import session_token

    size = {"num_cpus": 2, "num_gpus": gpus, "include_dashboard": False}
    with session_token():
        head = {"node_ip_address": f"127.0.0.{FIRST}", **size}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for node in range(1, nodes):
                cluster.add_node(node_ip_address=f"127.0.0.{FIRST + node}", **size)
            return subprocess.run([*command, f"cluster.address={cluster.address}"]).returncode
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
