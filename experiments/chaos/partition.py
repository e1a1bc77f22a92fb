"""A cluster of two nodes, each in a network namespace of its own, whose link can be cut. Needs root."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.chaos.run import Watch
from experiments.two_hosts.network import run

NAMESPACE, LINK, FAR_LINK = "dhp-far", "dhp-near", "dhp-link"
NEAR, FAR, PORT = "10.78.0.1", "10.78.0.2", 6399
CUT_S = 40.0  # longer than the limits by which the run notices
RAY = Path(sys.executable).with_name("ray")


@dataclass
class Nodes:
    """The cluster. environment: of those who join it."""

    environment: Mapping[str, str]
    near: list[subprocess.Popen[bytes]] = field(default_factory=list)
    far: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Of the head."""
        return f"{NEAR}:{PORT}"

    def pids(self) -> set[int]:
        """Of what was started."""
        return {process.pid for process in [*self.near, *self.far]}

    def start_near(self) -> None:
        """The head, with room for two actors."""
        self.near.append(self._start([], ["--head", f"--port={PORT}", f"--node-ip-address={NEAR}"]))

    def wait_for_near(self, limit_s: float = 120.0) -> None:
        """Until the head listens: a node that finds none gives up. Raises TimeoutError."""
        deadline = time.time() + limit_s
        while time.time() < deadline:
            with suppress(OSError), socket.create_connection((NEAR, PORT), timeout=1.0):
                time.sleep(3)
                return
            time.sleep(0.5)
        raise TimeoutError(f"no Ray at {self.address} after {limit_s:g} s")

    def start_far(self) -> None:
        """The other node, in its namespace: for the first time, or again, as its owner would."""
        inside = ["ip", "netns", "exec", NAMESPACE]
        self.far.append(self._start(inside, [f"--address={self.address}", f"--node-ip-address={FAR}"]))

    def end(self) -> None:
        """End both."""
        for process in [*self.far, *self.near]:
            process.terminate()
        for process in [*self.far, *self.near]:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, prefix: list[str], more: list[str]) -> subprocess.Popen[bytes]:
        command = [*prefix, str(RAY), "start", "--block", "--num-cpus=2", "--disable-usage-stats", *more]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, env={**os.environ, **self.environment}, **quiet)


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """The cluster, its link up. Raises `experiments.two_hosts.network.Unavailable` where it cannot be made."""
    run(f"ip netns add {NAMESPACE}")
    try:
        run(f"ip link add {LINK} type veth peer name {FAR_LINK} netns {NAMESPACE}")
        run(f"ip addr add {NEAR}/24 dev {LINK}")
        run(f"ip -n {NAMESPACE} addr add {FAR}/24 dev {FAR_LINK}")
        for up in (f"-n {NAMESPACE} link set lo up", f"-n {NAMESPACE} link set {FAR_LINK} up", f"link set {LINK} up"):
            run(f"ip {up}")
        nodes = Nodes({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
        try:
            nodes.start_near()
            nodes.wait_for_near()
            nodes.start_far()
            yield nodes
        finally:
            nodes.end()
    finally:
        run(f"ip netns del {NAMESPACE}")  # and the link with it


def cut_and_mend(nodes: Nodes, after_steps: int) -> Any:
    """As `experiments.chaos.run.Strike`: cut the link after so many steps; behind `CUT_S` it is up again, and the node
    that was given up is started once more."""

    def strike(watch: Watch) -> Mapping[str, Any] | None:
        if watch.fired is not None:
            if time.time() > float(watch.fired["at"]) + CUT_S and len(nodes.far) == 1:
                run(f"ip link set {LINK} up")
                nodes.far[0].terminate()
                nodes.far[0].wait()
                nodes.start_far()
            return None
        if watch.steps() < after_steps:
            return None
        run(f"ip link set {LINK} down")
        return {"at": time.time(), "process": "the link between two nodes", "pid": 0}

    return strike
