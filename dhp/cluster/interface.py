"""The network interface of the ranks' collectives: the one that has the address by which Ray knows the node.

Left alone, gloo looks up the host's own name, which many hosts map to 127.0.1.1 or to a container bridge, and ranks on
other hosts then wait for a connection that cannot come.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from ipaddress import ip_address

import psutil

from dhp.base.errors import ConfigError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"

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
    """Addresses of this host by interface; those without any are left out."""
    found = {
        name: [
            entry.address.partition("%")[0] for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)
        ]
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}
