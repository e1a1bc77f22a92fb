"""A Ray of our own stays on this host; a missing one is told at once; signals stay ours."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from dhp.cluster.ray_session import cluster_gpus, ray_session
from dhp.core.errors import ConfigError
from tests.helpers.sockets import LOOPBACK, listening_addresses, processes_naming


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
@pytest.mark.usefixtures("local_ray")
def test_a_local_ray_listens_on_loopback_only() -> None:
    import ray

    session = Path(ray.get_runtime_context().get_session_name()).name
    found = listening_addresses([os.getpid(), *processes_naming(session)])
    assert found and found <= LOOPBACK
    assert ray.util.get_node_ip_address() == "127.0.0.1"


@pytest.mark.usefixtures("local_ray")
def test_logical_gpus_are_counted() -> None:
    assert cluster_gpus() == 2.0


@pytest.mark.usefixtures("local_ray")
def test_sigterm_is_left_to_whoever_handled_it() -> None:
    """`ray.init` brings a handler that ends the process; Python's default must be back."""
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.usefixtures("local_ray")
def test_a_ray_of_our_own_keeps_no_events_of_tasks() -> None:
    """Its control store would keep 3 KiB for each call of a run, and nobody could ask for them."""
    import ray

    assert ray.get(ray.remote(lambda: os.getpid()).options(num_cpus=0).remote()) != os.getpid()
    end = time.monotonic() + 2.5  # events are sent every second
    while time.monotonic() < end:
        assert ray.timeline() == []
        time.sleep(0.25)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens_is_a_mistake_told_at_once(scheme: str) -> None:
    address = f"{scheme}127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError) as caught, ray_session(address, cpus=1):
        pass
    told = str(caught.value)
    assert told.startswith(f"cluster.address={address}: no Ray cluster answers there")
    assert "ray start --head" in told and "cluster.address=local" in told
