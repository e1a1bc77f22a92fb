"""Reads a cluster's nodes, counts devices, places data readers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dhp.cluster.ray_private import available_resources_per_node, client_mode_wrap
from dhp.cluster.ray_session import ray_session
from dhp.core.errors import ConfigError
from dhp.core.files import fingerprint

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


def this_node() -> str:
    """The id of this process's node; for a client (`ray://`), of the node that it talks to."""
    return ray.get_runtime_context().get_node_id()


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """A sort key by which numbers in a text count as numbers."""
    return tuple((int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", text) if piece)


SHOWN_NODES = 16  # nodes that a message lists


def describe_shortage(bundle: Resources, count: int, apart: bool, nodes: Sequence[ClusterNode]) -> str:
    """The reasons why `count` bundles do not fit on the nodes, in sentences.

    apart: whether each actor has a bundle of its own, so that sharing would need fewer."""
    asked = f"{count} × {_amounts(bundle)} asked for"
    listed = _shown(bundle, nodes)
    if not any(_fitting(bundle, node.total) for node in nodes):
        return (
            f"{asked}, but no node has {_amounts(bundle)} together, as each device of the run needs. {listed}. "
            "Start Ray on the nodes with more (`ray start --num-cpus=… --num-gpus=…`)"
        )
    fewer = "ask for fewer actors (num_actors of each part)"
    fewer += ", or share devices (cluster.collocate=true)" if apart else ""
    room = sum(_fitting(bundle, node.total) for node in nodes)
    if room < count:
        return (
            f"{asked}, and all nodes together have room for {room}: "
            f"{_missing(bundle, count, [node.total for node in nodes])}. {listed}. "
            f"Add nodes (`ray start --address=…`), or {fewer}"
        )
    free = free_bundles(bundle, nodes)
    if free < count:
        return (
            f"{asked}, and there is room for {free} now, as other work holds the rest: "
            f"{_missing(bundle, count, [node.free for node in nodes])}. {listed}. "
            f"Wait longer (cluster.start_timeout_s), end other work (`ray job list`, `ray status`), or {fewer}"
        )
    return f"{asked}, and there is room for them by now. {listed}. Start again, with a larger cluster.start_timeout_s"


def free_bundles(bundle: Resources, nodes: Sequence[ClusterNode]) -> int:
    """Bundles for which there is room now."""
    return sum(_fitting(bundle, node.free) for node in nodes)


def _fitting(bundle: Resources, has: Resources) -> int:
    """The number of bundles that a node with these resources holds."""
    return min(_times(need, has.get(name, 0.0)) for name, need in bundle.items() if need)


def _times(need: float, amount: float) -> int:
    if need >= 1:
        return int(amount // need)
    # Shares of a GPU do not reach from one GPU to the next.
    return int(amount) * int(1 / need) + int(amount % 1 / need)


def _missing(bundle: Resources, count: int, has: Sequence[Resources]) -> str:
    lacking = []
    for name, need in bundle.items():
        fitting = sum(_times(need, node.get(name, 0.0)) for node in has)
        if fitting < count:
            lacking.append(f"{(count - fitting) * need:g} {name}")
    if not lacking:
        return "what there is lies on different nodes, and each device of the run needs both on one"
    return f"{' and '.join(lacking)} missing"


def _shown(bundle: Resources, nodes: Sequence[ClusterNode]) -> str:
    shown = [
        f"{node.name} has "
        + " and ".join(f"{node.total.get(name, 0.0):g} {name} ({node.free.get(name, 0.0):g} free)" for name in bundle)
        for node in nodes[:SHOWN_NODES]
    ]
    more = [f"and {len(nodes) - SHOWN_NODES} more nodes"] if len(nodes) > SHOWN_NODES else []
    return f"Registered: {'; '.join([*shown, *more])}" if shown else "No node is registered"


def _amounts(bundle: Resources) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in bundle.items() if amount)


ANNOTATIONS = ".annotation_path"  # the end of keys whose files must be the same; of all others it is enough to be there
Signature = tuple[str, ...]


def reader_nodes(nodes: Sequence[str], needs: Mapping[str, str], timeout_s: float) -> list[str]:
    """Ids of the nodes that readers take turns on: of `nodes`, those of the run's ranks, the driver's first, where all
    paths of `needs` are, and annotations are the driver's own. Where that is none, the driver's.

    needs: paths by configuration key. timeout_s: until a node that does not answer is left out."""
    here = this_node()
    others = [node for node in nodes if node != here]
    if not others:
        return [here]
    ours = signature(needs)
    asking = {node: _ask(node, needs) for node in others}
    ready, _ = ray.wait(list(asking.values()), num_returns=len(asking), timeout=timeout_s)
    same = [node for node, ref in asking.items() if ref in ready and _answer(ref) == ours]
    return ([here] if here in nodes else []) + same or [here]


def signature(needs: Mapping[str, str]) -> Signature:
    """What this node has of the paths: of annotations a digest of their contents, of others whether they are there."""
    return tuple(_seen(key, Path(path)) for key, path in sorted(needs.items()))


def _seen(key: str, path: Path) -> str:
    try:
        if not path.exists():
            return "missing"
        if not key.endswith(ANNOTATIONS):
            return "there"
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        return fingerprint(files)
    except OSError as error:
        return f"unreadable: {error.strerror or error}"


def _ask(node: str, needs: Mapping[str, str]) -> ray.ObjectRef:
    pinned = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(signature).options(num_cpus=0, max_retries=0, scheduling_strategy=pinned).remote(dict(needs))


def _answer(ref: ray.ObjectRef) -> Signature | None:
    """None where the node was lost, or has no dhp."""
    try:
        found: Signature = ray.get(ref, timeout=0)
        return found
    except (RayError, GetTimeoutError):
        return None


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
