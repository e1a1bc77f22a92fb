"""Which nodes the processes that read data run on: those of the run's ranks that have the same data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dhp.cluster.placement.nodes import own_node
from dhp.core.files import fingerprint

ANNOTATIONS = ".annotation_path"  # the end of keys whose files must be the same; of all others it is enough to be there
Signature = tuple[str, ...]


def reader_nodes(nodes: Sequence[str], needs: Mapping[str, str], timeout_s: float) -> list[str]:
    """Ids of the nodes that readers take turns on: of `nodes`, those of the run's ranks, the driver's first, where all
    paths of `needs` are, and annotations are the driver's own. Where that is none, the driver's.

    needs: paths by configuration key. timeout_s: until a node that does not answer is left out.
    """
    here = own_node()
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
