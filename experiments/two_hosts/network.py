"""Two hosts of two ranks each out of network namespaces, one rate-limited link a rank.

    host A                            host B
    rank 0 ──limited──┐  bridge  ┌──limited── rank 2
      │ unlimited     ├──────────┤     │ unlimited
    rank 1 ──limited──┘          └──limited── rank 3

A rank has a namespace of its own, so that its address decides what goes over which link: gloo does not bind the source
of its connections, and two ranks in one namespace would share a link. Links are limited in both directions."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

RANKS, RANKS_A_HOST = 4, 2
NIC, INNER = "nic", "inner"  # a rank's link to the bridge, and to the other rank of its host
MTU = 9000  # as in data centres; headers are below 1% of it
BURST_BYTES = 20_000
# The links' rate, not what a sender makes of it: the one loss-based control that every kernel allows in a namespace, no
# starting anew after a pause, little data queued before a link, where the other direction's acknowledgements wait.
TCP = ("tcp_congestion_control=reno", "tcp_slow_start_after_idle=0", "tcp_limit_output_bytes=32768")
TOOLS = ("ip", "tc", "unshare", "sysctl")


class Unavailable(Exception):
    """This system cannot make the network."""


def require() -> None:
    """Raises Unavailable where something is missing that nobody but root, or no kernel without it, can replace."""
    if os.geteuid():
        raise Unavailable("network namespaces need root")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise Unavailable(
            f"{', '.join(missing)} not found; on Debian and Ubuntu: apt install iproute2 util-linux procps"
        )


def become_private(arguments: Sequence[str]) -> None:
    """Run again, with `arguments`, in namespaces of our own: all that is made there ends with us, even when killed.

    Does not return."""
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    os.execvp("unshare", [*command, sys.executable, "-m", *arguments])


def address(rank: int) -> str:
    """Where a rank listens."""
    return f"10.77.0.{rank + 1}"


def host(rank: int) -> int:
    """The host of a rank, 0 or 1."""
    return rank // RANKS_A_HOST


def build() -> None:
    """Make namespaces `rank0` … in the private namespaces of this process.

    Raises Unavailable when the kernel cannot."""
    run("mount -t tmpfs tmpfs /run")  # where ip keeps names: ours alone
    run("ip link add bridge type bridge")
    run("ip link set bridge up")
    for rank in range(RANKS):
        name = f"rank{rank}"
        run(f"ip netns add {name}")
        run(f"ip link add port{rank} mtu {MTU} type veth peer name {NIC} mtu {MTU} netns {name}")
        run(f"ip link set port{rank} master bridge up")
        run(f"ip -n {name} addr add {address(rank)}/24 dev {NIC}")
        for device in ("lo", NIC):
            run(f"ip -n {name} link set {device} up")
        for setting in TCP:
            run(f"ip netns exec {name} sysctl -qw net.ipv4.{setting}")
    for rank in range(0, RANKS, RANKS_A_HOST):
        _connect(rank, rank + 1)


def limit(mbit: float) -> None:
    """Give each rank's link to the other host this rate, megabits a second, in each direction."""
    bucket = f"root tbf rate {mbit}mbit burst {BURST_BYTES} limit {8 << 20}"
    for rank in range(RANKS):
        run(f"tc -n rank{rank} qdisc replace dev {NIC} {bucket}")
        run(f"tc qdisc replace dev port{rank} {bucket}")


def sent_over_link() -> int:
    """Bytes that this process's namespace has sent over its limited link, headers included."""
    with open("/proc/net/dev", encoding="ascii") as devices:
        line = next(line for line in devices if line.strip().startswith(f"{NIC}:"))
    return int(line.split(":")[1].split()[8])


def run(command: str) -> None:
    """Raises Unavailable with what the command said."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"`{command}` failed: {done.stderr.strip()}")


def _connect(first: int, second: int) -> None:
    run(f"ip -n rank{first} link add {INNER} mtu {MTU} type veth peer name {INNER} mtu {MTU} netns rank{second}")
    for own in (first, second):
        run(f"ip -n rank{own} link set {INNER} up")
    for own, other in ((first, second), (second, first)):
        run(f"ip -n rank{own} route add {address(other)}/32 dev {INNER} src {address(own)}")
