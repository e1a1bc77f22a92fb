"""A Ray of two nodes on this machine, 127.0.0.2 and 127.0.0.3, each of two logical CPUs and two logical GPUs."""

from collections.abc import Iterator

import pytest

from tests.helpers import forks

ADDRESSES = ("127.0.0.2", "127.0.0.3")


@pytest.fixture(scope="package")
def two_nodes() -> Iterator[str]:
    """The cluster's address. It asks for a token, which processes started from here have by their environment."""
    from ray.cluster_utils import Cluster

    from dhp.cluster.ray_session import session_token

    size = {"num_cpus": 2, "num_gpus": 2, "include_dashboard": False}
    with session_token(), forks.of_rays_here():
        cluster = Cluster(initialize_head=True, head_node_args={"node_ip_address": ADDRESSES[0], **size})
        try:
            cluster.add_node(node_ip_address=ADDRESSES[1], **size)
            yield cluster.address
        finally:
            cluster.shutdown()
