"""Two hosts of one rank each, out of the network that `experiments.two_hosts` makes."""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence

from experiments.two_hosts import network

HOSTS = (0, 2)  # of the network's ranks, the first of each host
PORT = 26379
NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def become_private(arguments: Sequence[str]) -> None:
    """Run again, with `arguments`, where a network of our own can be made; does not return. The Ray there asks for a
    token, which Ray reads when it is first imported."""
    network.require()
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    network.become_private(arguments)


def make_hosts(rate_mbit: float) -> str:
    """Build the network in this process's private namespaces, start a Ray node on each host, and go to the first one.
    The address of that Ray."""
    network.build()
    network.limit(rate_mbit)
    address = f"{network.address(HOSTS[0])}:{PORT}"
    head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
    for host, joining in zip(HOSTS, (head, [f"--address={address}"])):
        size = ["--num-cpus=1", f"--object-store-memory={1 << 30}"]
        command = [os.path.join(os.path.dirname(sys.executable), "ray"), "start", *size]
        inside = [*f"ip netns exec rank{host}".split(), *command, *joining]
        done = subprocess.run(
            [*inside, f"--node-ip-address={network.address(host)}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"layouts: no Ray on host {host}: {done.stdout}")
    enter(0)
    return address


def enter(number: int) -> None:
    """Move this process, and what it starts from now on, to host `number`, 0 or 1."""
    os.environ["GLOO_SOCKET_IFNAME"] = network.NIC
    with open(f"/run/netns/rank{HOSTS[number]}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace of host {number}")
