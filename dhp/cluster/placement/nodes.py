"""The nodes of a Ray cluster: where they are, what they have registered, and what of it is free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import ray
from ray._private.client_mode_hook import client_mode_wrap
from ray._private.state import available_resources_per_node

Resources = Mapping[str, float]


@dataclass(frozen=True)
class ClusterNode:
    """A living node. name: its address, with the beginning of its id where several nodes have that address."""

    id: str
    address: str
    name: str
    total: Resources
    free: Resources


def read_nodes() -> list[ClusterNode]:
    """The living nodes by address, 10.0.0.9 before 10.0.0.10, then by id."""
    free = client_mode_wrap(available_resources_per_node)()
    living = [node for node in ray.nodes() if node["Alive"]]
    addresses = [node["NodeManagerAddress"] for node in living]
    found = []
    for node, address in zip(living, addresses, strict=True):
        key = node["NodeID"]
        name = address if addresses.count(address) == 1 else f"{address} ({key[:6]})"
        found.append(ClusterNode(key, address, name, node["Resources"], free.get(key, {})))
    return sorted(found, key=lambda node: (natural(node.address), node.id))


def own_node() -> str:
    """The id of this process's node; for a client (`ray://`), of the node that it talks to."""
    return ray.get_runtime_context().get_node_id()


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """A sort key by which numbers in a text count as numbers."""
    return tuple((int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", text) if piece)
