"""Decides a run once: its stages, and a forecast's question."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from typing import Any, TypeVar

from dhp.batch.assign_images import ELSEWHERE, SAME_DEVICE, SAME_NODE, Locality
from dhp.config.layout import read_choices
from dhp.config.model_rules import check_cuts
from dhp.config.parts import DECODER, degrees, parts, resolved
from dhp.config.schema import ClusterConfig, Config, PartConfig
from dhp.config.steps import micro_batches, vision_batch
from dhp.core.errors import DhpError
from dhp.core.graph import HIDDEN_STATES, Edge, Node, RankDevice, StageGraph, StageSpec, Tie
from dhp.core.parameters import AdapterSettings, TrainingRules
from dhp.core.reports import RecomputePolicies
from dhp.models.family import VISION, Family
from dhp.models.shape import Parameter
from dhp.models.types import chunks_of
from dhp.plan.bench.machine import Machine
from dhp.plan.count.costs import Arrangement, arrange
from dhp.plan.count.counted_model import Counted, Cut, count_model
from dhp.plan.count.loads import RunLoads
from dhp.plan.cut.partition import LayerCuts, part_cuts
from dhp.plan.trainable import trained_stage
from dhp.step.schedule import Schedule, make_schedule


def make_graph(config: Config, counted: Counted, trains: bool = True) -> StageGraph:
    """The stages of a resolved configuration. counted: its model, with the run's parts. trains: false where nothing is
    trained, whatever the configuration says. Raises ConfigError for cuts that the model's layers do not admit."""
    family, rules = counted.family, counted.rules
    trained = trained_stage(rules, lambda: counted.parameters) if trains else lambda part, absent: False
    stages: list[StageSpec] = []
    ties: list[Tie] = []
    cuts = cache(lambda: part_cuts(config, counted, trains))
    for name, section in parts(config).items():
        part = family.parts[name]
        chunks = _chunks(name, section, len(part.layers.kinds), cuts)
        first = _first_device(config.cluster, name, stages)
        own = [
            replace(stage, trains=trained(name, part.absent(chunks_of(stage.chunks, part.whole))))
            for stage in _stages(name, section, chunks, first)
        ]
        stages += own
        if part.tied and len(own) > 1:
            ties.append(Tie(own[0].name, own[-1].name, rules.trains(part.tied_weight)))
    return StageGraph(tuple(stages), tuple(_edges(family, stages, vision_batch(config))), tuple(ties))


def _first_device(cluster: ClusterConfig, part: str, before: Sequence[StageSpec]) -> int:
    """The first device of a part. before: the stages of the parts before it."""
    if not before:
        return 0
    if not cluster.collocate:
        return before[-1].devices.stop
    tower = [stage for stage in before if stage.part == VISION]
    return tower[-1].devices.start if cluster.chain and part == DECODER else 0


def _stages(name: str, section: PartConfig, chunks: Sequence[range], first: int) -> list[StageSpec]:
    """The stages of a part: i of n holds chunks i, i + n, i + 2n, …; devices one after another, from `first` on."""
    split, count = degrees(section), resolved(section.pipeline)
    found = []
    for at in range(count):
        devices = range(first + at * split.world, first + (at + 1) * split.world)
        own = f"{name}.{at}" if count > 1 else name
        found.append(StageSpec(own, name, tuple(chunks[at::count]), split, True, devices))
    return found


def _chunks(name: str, section: PartConfig, layers: int, choose: Callable[[], Mapping[str, LayerCuts]]) -> list[range]:
    """The runs of layers in the order in which a micro-batch visits them. choose: those of all parts, where none
    are given. Raises ConfigError."""
    stages = resolved(section.pipeline)
    if section.cuts is not None:
        check_cuts(name, section.cuts, layers)
        cuts = list(section.cuts)
    else:
        cuts = list(choose()[name].cuts) if stages * section.virtual_stages > 1 else []
    bounds = [0, *cuts, layers]
    return [range(first, end) for first, end in zip(bounds, bounds[1:])]


@dataclass(frozen=True)
class _Run:
    """A run of layers and the node that computes it. back: a backward visits the node."""

    node: Node
    layers: range
    back: bool


def _edges(family: Family, stages: Sequence[StageSpec], batch: int) -> list[Edge]:
    """Edges from the runs behind whose layers tensors leave a part to where they enter a later one; hidden states go
    from run to run. batch: micro-batches that are one of an encoder."""
    edges: list[Edge] = []
    ends: dict[str, _Run] = {}  # by tensor, the run that it leaves
    for name, part in family.parts.items():
        own = [stage for stage in stages if stage.part == name]
        before: _Run | None = None
        for chunk in range(len(own[0].chunks)):
            for stage in own:
                node, layers = Node(stage.name, chunk), stage.chunks[chunk]
                into = _entering(node, layers, part.takes, ends, batch)
                if before is not None:
                    into.append(Edge(before.node, node, (HIDDEN_STATES,), before.back))
                before = _Run(node, layers, stage.trains or any(edge.gradients for edge in into))
                edges += into
                ends |= {tensor: before for tensor, layer in part.leaves.items() if layer in layers}
    return edges


def _entering(node: Node, layers: range, takes: Mapping[str, int], ends: Mapping[str, _Run], batch: int) -> list[Edge]:
    """An edge from each run of which something enters at these layers."""
    names: dict[_Run, list[str]] = {}
    for tensor, source in ends.items():
        if takes.get(tensor, -1) in layers:
            names.setdefault(source, []).append(tensor)
    return [Edge(source.node, node, tuple(of_source), source.back, batch) for source, of_source in names.items()]


def find_localities(
    graph: StageGraph, devices: Mapping[str, Sequence[RankDevice]], slack: float
) -> dict[str, Locality]:
    """By encoder, of those with a choice of replicas.

    devices: of each stage, by rank. slack: see `Locality`. Where the part that an encoder sends to is a pipeline, what
    counts is the first of its stages that gets anything."""
    found: dict[str, Locality] = {}
    for edge in graph.edges:
        source, target = graph.stage(edge.source.stage), graph.stage(edge.target.stage)
        if source.part == target.part or source.part in found or source.degrees.data == 1:
            continue
        senders, receivers = _of_replicas(source, devices), _of_replicas(target, devices)
        found[source.part] = Locality(tuple(tuple(_distance(own, o) for o in senders) for own in receivers), slack)
    return found


def devices_as_planned(graph: StageGraph) -> dict[str, list[RankDevice]]:
    """The devices of ranks on one node."""
    return {stage.name: [RankDevice(device, 0) for device in stage.devices] for stage in graph.stages}


def _of_replicas(stage: StageSpec, devices: Mapping[str, Sequence[RankDevice]]) -> list[set[RankDevice]]:
    """The devices of each data replica: data is the outermost axis of a mesh."""
    own, each = devices[stage.name], stage.degrees.world // stage.degrees.data
    return [set(own[first : first + each]) for first in range(0, len(own), each)]


def _distance(own: set[RankDevice], other: set[RankDevice]) -> int:
    if own & other:
        return SAME_DEVICE
    return SAME_NODE if {rank.node for rank in own} & {rank.node for rank in other} else ELSEWHERE


def world(config: Config) -> dict[str, dict[str, Any]]:
    """Actors and degrees of each part, by its name."""
    return {
        name: {
            "num_actors": part.num_actors,
            **asdict(degrees(part)),
            **_pipeline(part),
            "zero_stage": part.zero_stage,
            **({"zero_engine": part.zero_engine} if part.zero_stage else {}),
        }
        for name, part in parts(config).items()
    }


def _pipeline(part: PartConfig) -> dict[str, Any]:
    """Settings that say which stage holds which layers, where there are several."""
    if part.pipeline == 1:
        return {}
    cuts = {} if part.cuts is None else {"cuts": list(part.cuts)}
    virtual = {"virtual_stages": part.virtual_stages} if part.virtual_stages > 1 else {}
    partition = {} if part.partition is None else {"partition": part.partition}
    return {"pipeline": part.pipeline, **cuts, **partition, **virtual}


def stage_choices(recompute: str, graph: StageGraph, stage: StageSpec) -> RecomputePolicies:
    """What each of the stage's layers recomputes, from what the part's key says of all its layers."""
    of_part = graph.of_part(stage.part)
    choices = read_choices(recompute, sum(len(one.layers) for one in of_part))
    return tuple(choices[layer] for layer in stage.layers)


@dataclass(frozen=True)
class RunPlan:
    """One run. config: resolved. counted: its model, with the parts of the run, what is trained, and how. graph: its
    stages."""

    config: Config
    counted: Counted
    graph: StageGraph

    @property
    def source(self) -> str:
        """Where the model's configuration is read from (`dhp.models.pretrained`)."""
        return self.counted.source

    @property
    def family(self) -> Family:
        """The model's, with the parts of the run."""
        return self.counted.family

    @property
    def rules(self) -> TrainingRules:
        """What is trained, and how."""
        return self.counted.rules

    @property
    def adapters(self) -> Mapping[str, AdapterSettings]:
        """By part."""
        return self.counted.adapters

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters of the model, adapters' among them."""
        return self.counted.parameters


def plan_run(config: Config, source: str | None = None, trains: bool = True, counted: Counted | None = None) -> RunPlan:
    """The plan of a resolved configuration. source: None for the model's own directory or hub id. trains: false where
    nothing is trained, whatever the configuration says. counted: the model, where it was counted before. Raises
    ConfigError and ModelError."""
    counted = counted or count_model(config, source)
    return RunPlan(config, counted, make_graph(config, counted, trains))


T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """What a forecast is made from. plan: of the run. machine: that it is for."""

    plan: RunPlan
    machine: Machine
    loads: RunLoads

    @property
    def counted(self) -> Counted:
        """The run's model."""
        return self.plan.counted

    def passes(self, part: str) -> int:
        """Micro-batches of a step, as a part counts its own."""
        return -(-micro_batches(self.plan.config) // self.plan.graph.batch_of(part))

    @cached_property
    def schedule(self) -> Schedule:
        return make_schedule(self.plan.config.training.schedule, self.plan.graph, micro_batches(self.plan.config))

    @cached_property
    def arrangement(self) -> Arrangement:
        return arrange(self.plan.graph, self.schedule, "cuda" if self.machine.contexts else "cpu")


def is_quick(plan: RunPlan) -> bool:
    """Whether a forecast needs no trace that takes a minute: each part was traced before, or few of its layers are."""
    cuts = {name: Cut.of(section) for name, section in parts(plan.config).items() if name in (VISION, DECODER)}
    counted = plan.counted
    return all(counted.is_traced(name, cut) or counted.is_quick(name, cut) for name, cut in cuts.items())


def attempt(make: Callable[[], T]) -> T | str:
    """What `make` gives, or why it does not, for what is only said of a run: no defect of it may end the run itself."""
    try:
        return make()
    except DhpError as error:
        return str(error)
    except Exception as error:  # a family's own code, or a shape that no forecast has met
        return f"{type(error).__name__}: {error}"
