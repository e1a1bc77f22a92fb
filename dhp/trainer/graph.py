"""The graph of stages: derived once, before any actor, from a configuration and the model's shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from dhp.batch.assign_images import ELSEWHERE, SAME_DEVICE, SAME_NODE, Locality
from dhp.cluster.cluster import RankDevice
from dhp.config.model_rules import check_cuts, check_stages
from dhp.config.part import PartConfig
from dhp.config.parts import DECODER, parts, resolved
from dhp.config.schema import ClusterConfig, Config
from dhp.core.axes import Degrees
from dhp.core.graph import HIDDEN_STATES, Edge, Node, StageGraph, StageSpec, Tie
from dhp.models.family import VISION, Family
from dhp.models.types import chunks_of
from dhp.trainer.trainable import adapters_of, trained_stage, training_rules

if TYPE_CHECKING:
    from dhp.models.shape import DecoderSizes


def make_graph(config: Config, family: Family, source: str, trains: bool = True) -> StageGraph:
    """The stages of a resolved configuration for the model of `source`, as `dhp.models.pretrained` gives it. trains:
    false where nothing is trained, whatever the configuration says.

    Raises ConfigError for cuts that the model's layers do not admit.
    """
    family = family.having(parts(config))
    adapters = adapters_of(config)
    rules = training_rules(config.training, family, adapters)
    trained = trained_stage(rules, family, source, adapters) if trains else lambda part, absent: False
    stages: list[StageSpec] = []
    ties: list[Tie] = []
    for name, section in parts(config).items():
        part = family.parts[name]
        sizes = _sizes(source) if resolved(section.pipeline) > 1 and name == DECODER else None
        chunks = _chunks(name, section, len(part.layers.kinds), sizes)
        first = _first_device(config.cluster, name, stages)
        own = [
            replace(stage, trains=trained(name, part.absent(chunks_of(stage.chunks, part.whole))))
            for stage in _stages(name, section, chunks, first)
        ]
        stages += own
        if part.tied and len(own) > 1:
            ties.append(Tie(own[0].name, own[-1].name, rules.trains(part.tied_weight)))
    return StageGraph(tuple(stages), tuple(_edges(family, stages)), tuple(ties))


def _first_device(cluster: ClusterConfig, part: str, before: Sequence[StageSpec]) -> int:
    """The first device of a part. before: the stages of the parts before it."""
    if not before:
        return 0
    if not cluster.collocate:
        return before[-1].devices.stop
    tower = [stage for stage in before if stage.part == VISION]
    return tower[-1].devices.start if cluster.chain and part == DECODER else 0


def _sizes(source: str) -> DecoderSizes:
    from dhp.models.shape import decoder_sizes  # imports modeling code, which takes a second

    return decoder_sizes(source)


def degrees(part: PartConfig) -> Degrees:
    """The degrees of each stage of a resolved part."""
    return Degrees.read(lambda axis: resolved(getattr(part, axis)))


def even_cuts(sizes: DecoderSizes, stages: int) -> list[int]:
    """The cuts of the layers for which the largest stage has as few parameters as possible.

    Of several such cuts, the one whose first stages are smallest: they hold most micro-batches of 1F1B.

    What comes before the layers counts for the first stage, what comes after them for the last; a tied weight for both.
    """
    count, (before, behind) = len(sizes.layers), _outside(sizes)
    sums = list(accumulate(sizes.layers, initial=0))

    def weight(first: int, end: int) -> int:
        own = sums[end] - sums[first]
        return own + (before if first == 0 else 0) + (behind if end == count else 0)

    # best[k][first]: the largest of k stages that hold the layers from `first` on, and where the first of them ends.
    best: list[dict[int, tuple[int, int]]] = [{}, {first: (weight(first, count), count) for first in range(count)}]
    for k in range(2, stages + 1):
        best.append(
            {
                first: min(
                    (max(weight(first, end), best[k - 1][end][0]), end) for end in range(first + 1, count - k + 2)
                )
                for first in range(count - k + 1)
            }
        )
    cuts, first = [], 0
    for k in range(stages, 1, -1):
        first = best[k][first][1]
        cuts.append(first)
    return cuts


def _outside(sizes: DecoderSizes) -> tuple[int, int]:
    return sizes.embedding, sizes.norm + sizes.head


def _stages(name: str, section: PartConfig, chunks: Sequence[range], first: int) -> list[StageSpec]:
    """The stages of a part: i of n holds chunks i, i + n, i + 2n, …; devices one after another, from `first` on."""
    split, count = degrees(section), resolved(section.pipeline)
    found = []
    for at in range(count):
        devices = range(first + at * split.world, first + (at + 1) * split.world)
        own = f"{name}.{at}" if count > 1 else name
        found.append(StageSpec(own, name, tuple(chunks[at::count]), split, True, devices))
    return found


def _chunks(name: str, section: PartConfig, layers: int, sizes: DecoderSizes | None) -> list[range]:
    """The runs of layers in the order in which a micro-batch visits them. Raises ConfigError."""
    stages = resolved(section.pipeline)
    runs = stages * section.virtual_stages
    if section.cuts is not None:
        check_cuts(name, section.cuts, layers)
        cuts = list(section.cuts)
    else:
        check_stages(name, layers, stages, section.virtual_stages)
        cuts = [layers * run // runs for run in range(1, runs)]
        if section.virtual_stages == 1 and sizes is not None:
            cuts = even_cuts(sizes, runs)
    bounds = [0, *cuts, layers]
    return [range(first, end) for first, end in zip(bounds, bounds[1:])]


@dataclass(frozen=True)
class _Run:
    """A run of layers and the node that computes it. back: a backward visits the node."""

    node: Node
    layers: range
    back: bool


def _edges(family: Family, stages: Sequence[StageSpec]) -> list[Edge]:
    """Edges from the runs behind whose layers tensors leave a part to where they enter a later one; hidden states go
    from run to run."""
    edges: list[Edge] = []
    ends: dict[str, _Run] = {}  # by tensor, the run that it leaves
    for name, part in family.parts.items():
        own = [stage for stage in stages if stage.part == name]
        before: _Run | None = None
        for chunk in range(len(own[0].chunks)):
            for stage in own:
                node, layers = Node(stage.name, chunk), stage.chunks[chunk]
                into = _entering(node, layers, part.takes, ends)
                if before is not None:
                    into.append(Edge(before.node, node, (HIDDEN_STATES,), before.back))
                before = _Run(node, layers, stage.trains or any(edge.gradients for edge in into))
                edges += into
                ends |= {tensor: before for tensor, layer in part.leaves.items() if layer in layers}
    return edges


def _entering(node: Node, layers: range, takes: Mapping[str, int], ends: Mapping[str, _Run]) -> list[Edge]:
    """An edge from each run of which something enters at these layers."""
    names: dict[_Run, list[str]] = {}
    for tensor, source in ends.items():
        if takes.get(tensor, -1) in layers:
            names.setdefault(source, []).append(tensor)
    return [Edge(source.node, node, tuple(of_source), source.back) for source, of_source in names.items()]


def find_localities(
    graph: StageGraph, devices: Mapping[str, Sequence[RankDevice]], slack: float
) -> dict[str, Locality]:
    """By encoder, of those with a choice of replicas.

    devices: of each stage, by rank. slack: see `Locality`. Where the part that an encoder sends to is a pipeline, what
    counts is the first of its stages that gets anything.
    """
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
