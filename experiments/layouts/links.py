"""Two hosts of one rank each, with a link as slow for what a tower computes here as NVLink is on 8 H100.

The measure is the time that a tower layer under tensor parallelism communicates over the time that it computes. Each
rank sends four all-reduces of its hidden states (two forward, two backward), 2 (N−1)/N of them each, and does a share
1/N of 6 (4 H² + 3 H I) operations for every patch."""

import ctypes
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from experiments.layouts.work import TOWER, make_batch
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
            [*inside, f"--node-ip-address={network.address(host)}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
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


ROUNDS = 3


@dataclass(frozen=True)
class Machine:
    """Ranks that share a tower. operations_per_s: of one rank; link_bytes_per_s: from one rank to the others."""

    ranks: int
    hidden: int
    intermediate: int
    element_bytes: int
    operations_per_s: float
    link_bytes_per_s: float

    @property
    def bytes_a_patch(self) -> float:
        """Sent by a rank in a layer, forward and backward."""
        return 4 * 2 * (self.ranks - 1) / self.ranks * self.hidden * self.element_bytes

    @property
    def operations_a_patch(self) -> float:
        """Of a rank in a layer's matrices, forward and backward; each multiply-add is two."""
        return 6 * (4 * self.hidden**2 + 3 * self.hidden * self.intermediate) / self.ranks

    @property
    def ratio(self) -> float:
        """Seconds of communication for one of computation."""
        compute_s = self.operations_a_patch / self.operations_per_s
        return self.bytes_a_patch / self.link_bytes_per_s / compute_s


# Qwen2.5-VL's tower in bfloat16; 40% of the 989 TFLOP/s that the maker's data sheet gives for dense matrices, and all
# of NVLink's 450 GB/s in one direction.
H100 = Machine(8, 1280, 3420, 2, 0.4 * 989e12, 450e9)


def match(model: str) -> tuple[Machine, float]:
    """This machine's two ranks with a link of the H100s' ratio, and its rate in megabits a second."""
    measured = Machine(2, TOWER["hidden_size"], TOWER["intermediate_size"], 4, _operations_per_s(model), 1.0)
    seconds = measured.operations_a_patch / measured.operations_per_s * H100.ratio
    rate = measured.bytes_a_patch / seconds
    return Machine(2, measured.hidden, measured.intermediate, 4, measured.operations_per_s, rate), rate * 8 / 1e6


def _operations_per_s(model: str) -> float:
    """Of one thread, in the tower's matrices, forward and backward."""
    from experiments.layouts.peers import load  # which enters hosts

    torch.set_num_threads(1)
    tower = load(model).model.visual
    (sample, *_), best = make_batch("1k"), float("inf")
    pixels, grids = torch.cat([torch.from_numpy(p) for p in sample.pixels]), torch.tensor(sample.grids)
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        tower(pixels, grid_thw=grids).last_hidden_state.sum().backward()
        best = min(best, time.perf_counter() - begin)
    one = Machine(1, TOWER["hidden_size"], TOWER["intermediate_size"], 4, 1.0, 1.0)
    return one.operations_a_patch * TOWER["depth"] * len(pixels) / best
