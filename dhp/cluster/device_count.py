"""The devices of a Ray cluster, before a run is laid out on them."""

from __future__ import annotations

from dataclasses import dataclass

from dhp.cluster.placement.nodes import ClusterNode, read_nodes
from dhp.cluster.ray_session import ray_session
from dhp.core.errors import ConfigError

CPU, GPU = "CPU", "GPU"  # of Ray's resources
_KIND = "accelerator_type:"  # beginning of the resource by which Ray names a node's GPUs


@dataclass(frozen=True)
class DeviceCount:
    """Devices of one kind. kind: of GPU, as Ray names it (H100); None: cores of CPUs. count: in all; node: of the node
    that has least, so that what lies in one node does so in each."""

    kind: str | None
    count: int
    node: int


def count_devices(address: str, device: str, timeout_s: float) -> DeviceCount:
    """The devices of a running cluster. device: auto (GPUs, where there are any) | cpu | cuda. Raises ConfigError where
    its GPUs differ or are not named, and what joining the cluster raises."""
    with ray_session(address, 1, timeout_s=timeout_s):
        nodes = read_nodes()
    having = [node for node in nodes if node.total.get(GPU, 0) >= 1]
    if device == "cpu" or (device == "auto" and not having):
        return _sum(None, CPU, nodes)
    kinds = {_kind(node) for node in having}
    if len(kinds) != 1 or "" in kinds:
        named = ", ".join(f"{node.name} {_kind(node) or 'of no known kind'}" for node in having) or "none"
        raise ConfigError(
            f"a layout is planned for GPUs of one kind, and the nodes of the cluster at {address} have: {named}. "
            "Choose a layout by `python -m dhp plan device=NAME devices=N --write FILE.yaml`, or set degrees yourself"
        )
    return _sum(kinds.pop(), GPU, having)


def _sum(kind: str | None, resource: str, nodes: list[ClusterNode]) -> DeviceCount:
    own = [int(node.total.get(resource, 0)) for node in nodes]
    return DeviceCount(kind, sum(own), min((one for one in own if one), default=0))


def _kind(node: ClusterNode) -> str:
    return next((name.removeprefix(_KIND) for name in sorted(node.total) if name.startswith(_KIND)), "")
