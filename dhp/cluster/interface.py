"""The network interface of the ranks' collectives: the one that has the address by which Ray knows the node.

Left alone, gloo looks up the host's own name, which many hosts map to 127.0.1.1 or to a container bridge, and ranks on
other hosts then wait for a connection that cannot come.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

from dhp.base.errors import ConfigError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"

_SIOCGIFCONF = 0x8912  # Linux: list the IPv4 addresses of all interfaces
_ENTRY = struct.Struct("16s H 2x 4s 16x")  # struct ifreq: name, address family, port, address
_ROOM_ENTRIES = 1024  # entries to make room for
_IPV6_TABLE = Path("/proc/net/if_inet6")

Interfaces = Mapping[str, Sequence[str]]  # addresses by name


def choose_interface(address: str, loopback: bool) -> str:
    """Make this process's collectives use the interface with `address`, as `socket_settings` says. What was chosen."""
    chosen = socket_settings(address, loopback, read_interfaces(), os.environ)
    os.environ.update(chosen)
    return ", ".join(f"{key}={value}" for key, value in chosen.items()) or "as the environment says"


def open_listener(address: str) -> socket.socket:
    """A socket that listens on `address` alone, on a port of the system's choice.

    Raises ConfigError when this host does not have that address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family)
    except OSError as error:
        own = "; ".join(f"{name} {', '.join(addresses)}" for name, addresses in read_interfaces().items())
        raise ConfigError(
            f"no rank can listen on {address}, by which Ray knows its node ({error.strerror}). That host has {own}. "
            "Start Ray there with --node-ip-address=ADDRESS, one that the other nodes can reach"
        ) from error


def socket_settings(
    address: str, loopback: bool, interfaces: Interfaces, environment: Mapping[str, str]
) -> dict[str, str]:
    """Environment variables that put gloo and NCCL on the interface with `address`; {} where no interface has it.

    loopback: on the loopback interface, whatever the environment says. Otherwise a user's own setting stays.
    """
    name = interface_of(LOOPBACK if loopback else address, interfaces)
    if name is None:
        return {GLOO: "lo", NCCL: "=lo"} if loopback else {}
    wanted = {GLOO: name, NCCL: f"={name}"}  # without "=", NCCL takes every interface whose name starts so
    return {key: value for key, value in wanted.items() if loopback or key not in environment}


def interface_of(address: str, interfaces: Interfaces) -> str | None:
    """The interface with that address. Any loopback address (127.0.0.0/8) is the loopback interface's."""
    try:
        wanted = ip_address(address)
    except ValueError:  # a node known by a name
        return None
    for name, addresses in interfaces.items():
        own = [ip_address(found) for found in addresses]
        if wanted in own or (wanted.is_loopback and any(found.is_loopback for found in own)):
            return name
    return None


def read_interfaces() -> dict[str, list[str]]:
    """Addresses of this host by interface; {} on systems other than Linux."""
    if not sys.platform.startswith("linux"):
        return {}
    found: dict[str, list[str]] = {}
    for name, address in [*_read_ipv4(), *_read_ipv6()]:
        found.setdefault(name, []).append(address)
    return found


def _read_ipv4() -> list[tuple[str, str]]:
    import fcntl

    buffer = array.array("B", bytes(_ENTRY.size * _ROOM_ENTRIES))
    start, length = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", length, start))
    filled = struct.unpack("iP", answer)[0]
    entries = _ENTRY.iter_unpack(bytes(buffer[:filled]))
    return [
        (name.rstrip(b"\0").decode().partition(":")[0], socket.inet_ntoa(packed))
        for name, family, packed in entries
        if family == socket.AF_INET
    ]


def _read_ipv6() -> list[tuple[str, str]]:
    rows = [line.split() for line in _IPV6_TABLE.read_text().splitlines()] if _IPV6_TABLE.exists() else []
    return [(row[-1], str(ip_address(bytes.fromhex(row[0])))) for row in rows]
