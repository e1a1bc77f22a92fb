"""A run's share of Ray: session, reservation, groups of actors."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import ray
from ray.util.client import ray as client
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dhp.cluster.address import LOCAL
from dhp.cluster.clock import ClockReading, offset_ns
from dhp.cluster.data_actor import DatasetActor
from dhp.cluster.gpus import check_devices_here, choose_backend, choose_device, choose_transport
from dhp.cluster.hangs.lookout import Lookout
from dhp.cluster.hangs.watch import Watched, asking, wait_all
from dhp.cluster.host import beacon
from dhp.cluster.placement.nodes import free_bundles, read_nodes, reader_nodes, this_node
from dhp.cluster.placement.reservation import (
    PATIENCE_S,
    TENSOR,
    Slot,
    Topology,
    beside,
    bundle_nodes,
    describe_straddle,
    find_straddles,
    find_topology,
    map_ranks,
    plan_placement,
    refuse_straddle,
    reserve,
    wait_for_gpus,
)
from dhp.cluster.ray_private import actor_id
from dhp.cluster.ray_session import cluster_gpus, ray_session
from dhp.cluster.servers import limited_teardown, require_servers, silence_understood_warnings
from dhp.cluster.worker import GIVEN, GroupSettings, Worker
from dhp.core.dispatch import Call, PerRank, spread
from dhp.core.errors import ConfigError
from dhp.core.graph import NCCL, RankDevice, StageGraph, Way
from dhp.core.process import ending_on_error, say_nothing


class ActorGroup:
    """`size` ranks of one stage. Calls go to all ranks, each rank runs its calls in the order of submission."""

    def __init__(
        self,
        settings: GroupSettings,
        slots: Sequence[Slot],
        reserved: PlacementGroup,
        nodes: Sequence[str] = (),
        lookout: Lookout | None = None,
    ):
        """nodes: the name of each rank's node, for messages; none on the machine of the run itself. lookout: of the
        run, who looks at its ranks; None: nobody does."""
        self.settings, self.size = settings, settings.size
        self._nodes = list(nodes) or [""] * settings.size
        self._watched: list[Watched] = []
        self._actors = [self._create(slot, rank, reserved) for rank, slot in enumerate(slots)]
        self._lookout = lookout
        if lookout is not None:
            for rank, actor in enumerate(self._actors):
                lookout.add(f"{settings.stage} rank {rank}", actor.post.remote())

    def start(self, factory: Callable[..., Any], *arguments: Any) -> None:
        """Submit rendezvous and the making of each rank's engine; `take_watched` has the calls to wait for."""
        self.address = self._actors[0].listen.options(num_returns=2).remote()
        self._submit("joining the group", [actor.join.remote(*self.address) for actor in self._actors])
        self.build(factory, *arguments)

    def build(self, factory: Callable[..., Any], *arguments: Any) -> None:
        """Submit the making of each rank's engine, in the place of one that is there."""
        self._submit("loading the stage", [actor.build.remote(factory, arguments) for actor in self._actors])

    def link(self, address: Sequence[Any], ways: Sequence[Way], sizes: Mapping[str, int]) -> None:
        """Submit that each rank connects with those of other stages, at the store of the group that has this
        address."""
        links = [actor.link.remote(tuple(ways), dict(sizes), *address) for actor in self._actors]
        self._submit("connecting with other stages", links)

    def execute_all_async(
        self, method: str | Callable[..., Any], *arguments: Any, returns: int | PerRank = 1
    ) -> list[list[Any]]:
        """Submit a method of the engine, by name or as one, on every rank; for each rank, the refs of its `returns`
        results."""
        return self.execute_in_turn_async(Call(method, arguments, returns))

    def execute_in_turn_async(self, *calls: Call) -> list[list[Any]]:
        """Submit methods that each rank runs one after another, in one call of the actor, which begins once the
        arguments of all are there; for each rank, the refs of all results."""
        names = list(dict.fromkeys(call.name for call in calls))
        given = [spread(call.arguments, self.size) for call in calls]
        counts = [spread((call.returns,), self.size) for call in calls]
        refs = []
        for rank, actor in enumerate(self._actors):
            verbs = tuple(_verb(call, of_ranks[rank], rank) for call, of_ranks in zip(calls, given))
            count = sum(of_ranks[rank][0] for of_ranks in counts)
            remote = actor.call.options(num_returns=1 + count, name=f"{self.settings.stage}.{'+'.join(names)}")
            values = (value for of_ranks in given for value in of_ranks[rank] if isinstance(value, ray.ObjectRef))
            answer = remote.remote(verbs, *values)
            refs.append(list(answer) if count else [answer])
        self._submit(", then ".join(names), [of_rank[0] for of_rank in refs])
        return [of_rank[1:] for of_rank in refs]

    def execute_all(self, method: str, *arguments: Any, timeout_s: float, returns: int = 1) -> list[Any]:
        """Run `method` on every rank and wait: the result of each rank, in rank order; raises as `wait_all` does."""
        refs = self.execute_all_async(method, *arguments, returns=returns)
        wait_all(self.take_watched(), timeout_s)
        results = [ray.get(of_rank) for of_rank in refs]
        return [of_rank[0] for of_rank in results] if returns == 1 else results

    def look_ahead(self, of_ranks: Sequence[Sequence[Any]]) -> None:
        """Let each rank fetch its refs of the next step's data during the step that is submitted now."""
        # Inside a list, for Ray resolves only top-level arguments: the call does not wait for them.
        refs = [actor.look_ahead.remote(list(own)) for actor, own in zip(self._actors, of_ranks, strict=True)]
        self._submit("looking ahead", refs)

    def take_spans_async(self, keep: bool = True) -> list[Any]:
        """For each rank, the ref of what it did since the last time; empty lists when the run is not traced. keep:
        false forgets it."""
        refs = [actor.take_spans.remote(keep) for actor in self._actors]
        self._submit("telling what it did", refs)
        return refs

    def clock_offsets(self, timeout_s: float) -> list[int]:
        """What to add to each rank's clock to get this process's, nanoseconds."""
        return [offset_ns(partial(_read_clock, actor, timeout_s)) for actor in self._actors]

    def take_watched(self) -> list[Watched]:
        """The calls submitted since the last time, for `wait_all`."""
        taken, self._watched = self._watched, []
        return taken

    def stop(self) -> None:
        """End all ranks, whatever they are doing."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)

    def _create(self, slot: Slot, rank: int, reserved: PlacementGroup) -> Any:
        # No restarts: Ray would put an empty actor in a dead one's place and the next call would not notice.
        options = {"max_restarts": 0, "max_task_retries": 0, "num_cpus": slot.cpus, "num_gpus": slot.gpus}
        strategy = PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=slot.bundle)
        actor = ray.remote(Worker).options(scheduling_strategy=strategy, **options)
        return actor.remote(self.settings, rank)

    def _submit(self, what: str, refs: Sequence[Any]) -> None:
        stage = self.settings.stage
        for rank, (actor, ref) in enumerate(zip(self._actors, refs, strict=True)):
            who, node = f"{stage} rank {rank}", self._nodes[rank]
            self._watched.append(Watched(who, what, ref, actor_id(actor), node, self._lookout))


def _verb(call: Call, arguments: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """As `Worker.call` takes it."""
    sends = () if call.sends is None else (call.sends.values[rank],)
    return call.name, tuple(map(_plain, arguments)), *sends


def _plain(value: Any) -> Any:
    """An argument as it is sent: plain ones together, which is cheaper than one by one, and refs for Ray to resolve."""
    return GIVEN if isinstance(value, ray.ObjectRef) else value


def _read_clock(actor: Any, timeout_s: float) -> ClockReading:
    return ray.get(actor.read_clock.remote(), timeout=timeout_s)


@dataclass(frozen=True)
class ClusterSpec:
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
    waits for its devices then, 5 s at least; None: start_timeout_s. restarted: it had its devices before."""

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
    linked = False  # ranks of different stages send tensors to each other without the host

    def __init__(self, layout: ClusterSpec, say: Callable[[str], None] = say_nothing):
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
            common = self._common(choose_backend(plan.bundles_per_gpu), topology.threads(slots))
            self.threads: int = common["threads"]
            common["shares_gpu"] = any(slot.gpus < 1 for of_stage in plan.slots.values() for slot in of_stage)
            passes = layout.graph.gradients_merge
            where = topology.describe(slots), len(topology.nodes)
            common["transport"] = choose_transport(layout.transport, *where, plan.gpus, plan.bundles_per_gpu, passes)
            self.linked = common["transport"] == NCCL
            if not topology.only(this_node()):
                common["beacon"] = stack.enter_context(beacon(layout.checkpoint_dir))
            self._lookout = _make_lookout(layout, topology)
            stack.callback(self._lookout.stop)
            self.groups = {}
            for stage in layout.graph.stages:
                of_stage, needs = slots[stage.name], layout.needs.get(stage.part, {})
                nodes = () if local else topology.names(of_stage)
                settings = GroupSettings(
                    stage.name, len(of_stage), needs=needs, beside=beside(stage.name, slots), **common
                )
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

    def link(self) -> None:
        """Let ranks that send to each other connect, where tensors do not go through the host; behind their start."""
        if self.linked:
            first, *_ = self.groups.values()
            sizes = {name: group.size for name, group in self.groups.items()}
            for group in self.groups.values():
                group.link(first.address, self._layout.graph.ways(), sizes)

    def dataset_actor(
        self, factory: Callable[..., Any], *arguments: Any, micro_batches: int, workers: int = 0, prefetch: int = 0
    ) -> DatasetActor:
        """The actors that read the data, ended with the cluster; arguments as `DatasetActor` has them."""
        layout = self._layout
        own: dict[str, Any] = {"log_dir": layout.log_dir, "needs": layout.needs.get("data", {}), "trace": layout.trace}
        own["lookout"] = self._lookout
        graph = layout.graph
        step: dict[str, Any] = {"micro_batches": micro_batches, "shards": graph.works(), "batches": graph.batches()}
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

    def put(self, value: Any) -> Any:
        """A ref of a value of this process, which is not written to any more."""
        with warnings.catch_warnings():
            silence_understood_warnings()
            return ray.put(value)

    def values(self, refs: Sequence[Any]) -> list[Any]:
        """The values behind refs of finished calls."""
        return ray.get(list(refs))

    def devices_available(self) -> int:
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


def _make_lookout(layout: ClusterSpec, topology: Topology) -> Lookout:
    names = {} if layout.address == LOCAL else {node.id: node.name for node in topology.nodes}
    # A Ray client's node is the head's by Ray's word, but its processes are none of this machine.
    here = "" if client.is_connected() else this_node()
    return Lookout(layout.collective_timeout_s, layout.log_dir, here, names)


def warn_cross_node_groups(
    slots: Mapping[str, Sequence[Slot]], topology: Topology, degrees: Mapping[str, Mapping[str, int]], device: str
) -> None:
    """One warning of all groups of the inner axes that span nodes, if there are any.

    Raises ConfigError where GPUs of a tensor group do: they would wait for the network most of the time."""
    straddles = find_straddles(slots, topology.of_bundle, degrees)
    refused = [straddle for straddle in straddles if device == "cuda" and straddle.axis == TENSOR]
    if refused:
        lines = [refuse_straddle(s, degrees[s.stage], topology.names(slots[s.stage])) for s in refused]
        raise ConfigError("\n".join([*lines, f"The nodes: {topology.gpus()}"]))
    if straddles:
        lines = [describe_straddle(straddle, topology.names(slots[straddle.stage])) for straddle in straddles]
        warnings.warn("\n".join(lines), stacklevel=2)
