"""A run's share of Ray: session, reservation, the groups of all stages and the dataset actor, all ended together."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import ray
from ray.util.client import ray as client
from ray.util.placement_group import remove_placement_group

from dhp.cluster.actor_group import ActorGroup
from dhp.cluster.address import LOCAL
from dhp.cluster.choose import check_devices_here, choose_backend, choose_device, choose_transport
from dhp.cluster.control_store import asking
from dhp.cluster.data_actor import DatasetActor
from dhp.cluster.host import beacon
from dhp.cluster.lookout import Lookout
from dhp.cluster.placement.nodes import free_bundles, own_node, read_nodes
from dhp.cluster.placement.rank_mapping import TENSOR, describe_straddle, find_straddles, map_ranks, refuse_straddle
from dhp.cluster.placement.readers import reader_nodes
from dhp.cluster.placement.reservation import (
    PATIENCE_S,
    Slot,
    Topology,
    bundle_nodes,
    find_topology,
    plan_placement,
    reserve,
    wait_for_gpus,
)
from dhp.cluster.rank_device import RankDevice
from dhp.cluster.ray_session import cluster_gpus, ray_session
from dhp.cluster.servers import limited_teardown, require_servers
from dhp.cluster.worker import GroupSettings
from dhp.core.errors import ConfigError
from dhp.core.graph import StageGraph
from dhp.core.process import ending_on_error, say_nothing


@dataclass(frozen=True)
class Layout:
    """What to start: the actors of each stage, on which devices, under which limits.

    graph: the stages.

    device: auto | cpu | cuda. address: of Ray, see `dhp.cluster.ray_session`.

    threads: of an actor on a CPU; None: by the node's.

    start_timeout_s: for devices; build_timeout_s: until the stages are loaded, None: as long.

    checkpoint_dir: exists, and must be the same directory on all nodes.

    transport: of tensors between the stages, see `choose_transport`.

    trace: actors keep spans.

    needs: of each part, and of "data", the paths that must exist on its actors' nodes, by configuration key.

    check_collectives, steps_done: see `dhp.cluster.worker.GroupSettings`.

    collective_timeout_s: the longest that a collective may hold a rank, once the stages are loaded. saving_s: the
    longest that ranks may write a checkpoint while others wait in the next step; 0: they write beside the steps.

    elastic: the run has layouts for fewer devices, and shares no GPU that it would have alone. reserve_s: how long it
    waits for its devices then, 5 s at least; None: start_timeout_s. restarted: it had its devices before.
    """

    graph: StageGraph
    device: str
    address: str
    threads: int | None
    start_timeout_s: float
    step_timeout_s: float
    log_dir: str
    checkpoint_dir: str
    transport: str = "auto"
    trace: bool = False
    needs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    build_timeout_s: float | None = None
    check_collectives: bool = False
    collective_timeout_s: float = 600.0
    saving_s: float = 0.0
    steps_done: int = 0
    elastic: bool = False
    reserve_s: float | None = None
    restarted: bool = False


GROUP_LATER_S = 30.0  # a group's own limit is so much longer: what it raises names who waits, not who is waited for


class Cluster:
    """A context: on entry it reserves its resources and creates its actors; after exit none of them runs."""

    groups: dict[str, ActorGroup]
    device: str
    devices: Mapping[str, Sequence[RankDevice]]  # of each stage, by rank

    def __init__(self, layout: Layout, say: Callable[[str], None] = say_nothing):
        """say: receives a line when something that takes time begins."""
        self._layout, self._say = layout, say
        self._stack = ExitStack()
        self._readers: Sequence[str] | None = None

    def __enter__(self) -> Cluster:
        layout = self._layout
        bundles = layout.graph.device_count()
        if layout.address == LOCAL:
            check_devices_here(layout.device, bundles, layout.graph.sharing() > 1)
        with ExitStack() as stack, ending_on_error():  # whatever fails in here takes down what stands already
            cpus = max(bundles, os.cpu_count() or 1)
            local = layout.address == LOCAL
            self._say("starting Ray on this machine" if local else f"joining the Ray cluster at {layout.address}")
            stack.enter_context(ray_session(layout.address, cpus, timeout_s=layout.start_timeout_s, say=self._say))
            if not local:
                stack.enter_context(asking())
            waits_s = layout.start_timeout_s if layout.reserve_s is None else max(layout.reserve_s, PATIENCE_S)
            key = "cluster.start_timeout_s" if layout.reserve_s is None else "training.elastic_wait_s"
            gpus = cluster_gpus()
            if not (gpus or local) and layout.restarted and layout.device == "cuda":
                gpus = wait_for_gpus(waits_s, key)
            self.device = choose_device(layout.device, gpus)
            devices = {stage.name: stage.devices for stage in layout.graph.stages}
            plan = plan_placement(devices, gpus if self.device == "cuda" else 0.0, shares=not layout.elastic)
            self._say(f"reserving {bundles} device{'s' if bundles > 1 else ''}")
            reserved = reserve(plan, waits_s, key)
            self._bundle = plan.bundles[0]
            stack.callback(remove_placement_group, reserved)
            self._topology = topology = find_topology(bundle_nodes(reserved), read_nodes())
            degrees = {stage.name: stage.degrees.by_axis() for stage in layout.graph.stages}
            slots = map_ranks(plan.slots, topology.of_bundle, degrees)
            warn_cross_node_groups(slots, topology, degrees, self.device)
            self.devices = {
                name: tuple(RankDevice(slot.bundle, topology.of_bundle[slot.bundle]) for slot in of_stage)
                for name, of_stage in slots.items()
            }
            self._where = f", on nodes {topology.describe(slots)}" if len(topology.nodes) > 1 else ""
            common = self._common(choose_backend(self.device, plan.gpus_per_bundle), topology.threads(slots))
            self.threads: int = common["threads"]
            common["shares_gpu"] = any(slot.gpus < 1 for of_stage in plan.slots.values() for slot in of_stage)
            common["transport"] = choose_transport(
                layout.transport, topology.describe(slots), len(topology.nodes), gpus if self.device == "cuda" else 0.0
            )
            if not topology.only(own_node()):
                common["beacon"] = stack.enter_context(beacon(layout.checkpoint_dir))
            self._lookout = _make_lookout(layout, topology)
            stack.callback(self._lookout.stop)
            self.groups = {}
            for stage in layout.graph.stages:
                of_stage, needs = slots[stage.name], layout.needs.get(stage.part, {})
                nodes = () if local else topology.names(of_stage)
                settings = GroupSettings(stage.name, len(of_stage), needs=needs, **common)
                group = ActorGroup(settings, of_stage, reserved, nodes, self._lookout)
                stack.callback(group.stop)
                self.groups[stage.name] = group
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with limited_teardown(error):
            self._stack.__exit__(kind, error, trace)

    def dataset_actor(
        self,
        factory: Callable[..., Any],
        *arguments: Any,
        micro_batches: int,
        workers: int = 0,
        prefetch: int = 0,
    ) -> DatasetActor:
        """The actors that read the data, ended with the cluster; arguments as `DatasetActor` has them."""
        layout = self._layout
        own: dict[str, Any] = {"log_dir": layout.log_dir, "needs": layout.needs.get("data", {}), "trace": layout.trace}
        own["lookout"] = self._lookout
        graph = layout.graph
        step: dict[str, Any] = {"micro_batches": micro_batches, "shards": graph.works()}
        nodes = self._reader_nodes() if workers else ()
        actor = DatasetActor(factory, *arguments, **step, workers=workers, prefetch=prefetch, nodes=nodes, **own)
        self._stack.callback(actor.stop)
        return actor

    def _reader_nodes(self) -> Sequence[str]:
        """Ids of the nodes that read data; looked for once."""
        if self._readers is None:
            layout, nodes = self._layout, self._topology.nodes
            found = reader_nodes([node.id for node in nodes], layout.needs.get("data", {}), layout.start_timeout_s)
            self._readers = found
            if len(nodes) > 1:
                names = [node.name for node in nodes if node.id in found]
                self._say(f"data workers run on {', '.join(names) or 'the node of the driver'}")
        return self._readers

    def values(self, refs: Sequence[Any]) -> list[Any]:
        """The values behind refs of finished calls."""
        return ray.get(list(refs))

    def devices_there(self) -> int:
        """Devices that this run could have: its own, and those that nothing uses. Raises ClusterError where Ray's
        control store, which is asked, is gone."""
        require_servers()
        return self._layout.graph.device_count() + free_bundles(self._bundle, read_nodes())

    @property
    def build_timeout_s(self) -> float:
        """The longest wait for the stages to be loaded, seconds."""
        layout = self._layout
        return layout.start_timeout_s if layout.build_timeout_s is None else layout.build_timeout_s

    def describe(self) -> str:
        """One line: how many actors of each stage, where."""
        graph = self._layout.graph
        *first, last = (f"{stage.degrees.world} {stage.name}" for stage in graph.stages)
        actors = f"{', '.join(first)} and {last}" if first else last
        where = "sharing devices" if graph.sharing() > 1 else "each on a device of its own"
        return f"{actors} actors on {self.device}, {where}{self._where}"

    def _common(self, backend: str, threads: int) -> dict[str, Any]:
        """The settings that all groups have in common. threads: an actor's, as the nodes' CPUs suggest."""
        layout = self._layout
        local = layout.address == LOCAL
        if local:  # a Ray of our own may have registered more CPUs than there are
            threads = max(1, (os.cpu_count() or 1) // max(map(layout.graph.ranks_of, layout.graph.parts())))
        return {
            "backend": backend,
            "threads": layout.threads or threads,
            "timeout_s": max(layout.step_timeout_s, self.build_timeout_s),
            "log_dir": layout.log_dir,
            "loopback": local,
            "trace": layout.trace,
            "keep_memory": self.device == "cpu",
            "pinned": self.device == "cuda",
            "cuda": self.device == "cuda",
            "check_collectives": layout.check_collectives,
            "collective_s": layout.collective_timeout_s + layout.saving_s + GROUP_LATER_S,
            "steps_done": layout.steps_done,
        }


def _make_lookout(layout: Layout, topology: Topology) -> Lookout:
    names = {} if layout.address == LOCAL else {node.id: node.name for node in topology.nodes}
    # A Ray client's node is the head's by Ray's word, but its processes are none of this machine.
    here = "" if client.is_connected() else own_node()
    return Lookout(layout.collective_timeout_s, layout.log_dir, here, names)


def warn_cross_node_groups(
    slots: Mapping[str, Sequence[Slot]], topology: Topology, degrees: Mapping[str, Mapping[str, int]], device: str
) -> None:
    """One warning of all groups of the inner axes that span nodes, if there are any.

    Raises ConfigError where GPUs of a tensor group do: they would wait for the network most of the time.
    """
    straddles = find_straddles(slots, topology.of_bundle, degrees)
    refused = [straddle for straddle in straddles if device == "cuda" and straddle.axis == TENSOR]
    if refused:
        lines = [refuse_straddle(s, degrees[s.stage], topology.names(slots[s.stage])) for s in refused]
        raise ConfigError("\n".join([*lines, f"The nodes: {topology.gpus()}"]))
    if straddles:
        lines = [describe_straddle(straddle, topology.names(slots[straddle.stage])) for straddle in straddles]
        warnings.warn("\n".join(lines), stacklevel=2)
