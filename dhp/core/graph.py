"""The graph of stages: nodes, edges, routes between shards.

A *part* is what the user configures (vision, text). A *stage* is what one group of actors runs: all of a part, or some
of its layers. A *chunk* is a run of neighbouring layers that a stage computes at a time; a stage of an interleaved
pipeline (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2) has
several. A *node* is a chunk of a stage: what a schedule visits and what edges connect."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from dhp.core.axes import Degrees


@dataclass(frozen=True)
class Route:
    """pairs: (shard of the source, shard of the target) wherever there are rows to send, sorted.

    A shard is a position of the stage's mesh but for tensor: see `dhp.core.axes.Degrees.shards`."""

    pairs: tuple[tuple[int, int], ...]

    @cached_property
    def targets(self) -> Mapping[int, tuple[int, ...]]:
        """The targets of each source that sends, in order."""
        return _grouped(self.pairs)

    @cached_property
    def sources(self) -> Mapping[int, tuple[int, ...]]:
        """The sources of each target that receives, in order."""
        return _grouped((target, source) for source, target in sorted(self.pairs))


def straight(shards: int) -> Route:
    """Each shard sends to its own counterpart: between stages of one part."""
    return Route(tuple((shard, shard) for shard in range(shards)))


def dense(sources: int, targets: int) -> Route:
    """Every shard sends to every shard."""
    return Route(tuple((source, target) for source in range(sources) for target in range(targets)))


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for first, second in pairs:
        found.setdefault(first, []).append(second)
    return {first: tuple(seconds) for first, seconds in found.items()}


@dataclass(frozen=True)
class Way:
    """What ranks of one stage send ranks of another: between each two, in the order of micro-batches.

    pairs: (rank that sends, rank that receives), all that there may be in any step."""

    source: str
    target: str
    pairs: tuple[tuple[int, int], ...]


def forward_way(edge: int) -> int:
    """The number among `StageGraph.ways` of what goes along an edge, by its number."""
    return 2 * edge


def backward_way(edge: int) -> int:
    """Of what comes back along it."""
    return 2 * edge + 1


# How tensors go along edges, and back.
TRANSPORTS = SHARED_MEMORY, OBJECT_STORE, CUDA_IPC, NCCL = ("shared_memory", "object_store", "cuda_ipc", "nccl")
HIDDEN_STATES = "hidden_states"  # the output of one range of layers, input of the next


@dataclass(frozen=True, order=True)
class Node:
    """A chunk of a stage."""

    stage: str
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.stage}/{self.chunk}" if self.chunk else self.stage


@dataclass(frozen=True)
class StageSpec:
    """The part, or run of its layers, that one group of actors runs.

    name: "vision", "text", or "text.1" where the part has several stages. part: its section of the configuration.

    chunks: the part's layers that it holds, a range for each chunk, in the order in which a micro-batch visits them.

    degrees: its mesh.

    trains: some of its parameters are trained. False: no gradients of weights, no optimizer.

    devices: the logical devices of its ranks, rank after rank. Stages whose ranges overlap share these devices."""

    name: str
    part: str
    chunks: tuple[range, ...]
    degrees: Degrees
    trains: bool
    devices: range

    @property
    def nodes(self) -> tuple[Node, ...]:
        """One for each chunk."""
        return tuple(Node(self.name, chunk) for chunk in range(len(self.chunks)))

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers that it holds, by their number in the part."""
        return tuple(layer for chunk in self.chunks for layer in chunk)


def part_of(stage: str) -> str:
    """The part of a stage, by its name: `text` of `text.1`."""
    return stage.partition(".")[0]


@dataclass(frozen=True)
class Edge:
    """From a node to a later one.

    tensors: names in the bundle that it carries.

    gradients: their gradients go back: something at the source, or before it, is trained.

    batch: consecutive micro-batches of the target that are one of the source, as where an encoder takes the pictures
    of several in one pass."""

    source: Node
    target: Node
    tensors: tuple[str, ...]
    gradients: bool
    batch: int = 1

    def __str__(self) -> str:
        back = "" if self.gradients else ", no gradients back"
        one = "" if self.batch == 1 else f", for {self.batch} micro-batches"
        return f"{self.source} → {self.target}: {', '.join(self.tensors)}{one}{back}"

    def of_target(self, number: int, count: int) -> range:
        """The target's micro-batches, of so many, that a micro-batch of the source is for."""
        return range(number * self.batch, min((number + 1) * self.batch, count))


def ranks_of_shard(stage: StageSpec, shard: int) -> range:
    """The ranks of a stage that have a shard, its tensor ranks; the first of them sends for it."""
    tensor = stage.degrees.tensor
    return range(shard * tensor, (shard + 1) * tensor)


def _way(source: StageSpec, target: StageSpec, shards: Iterable[tuple[int, int]]) -> Way:
    return Way(
        source.name,
        target.name,
        tuple(
            (ranks_of_shard(source, here)[0], rank) for here, there in shards for rank in ranks_of_shard(target, there)
        ),
    )


@dataclass(frozen=True)
class Tie:
    """A weight that two stages hold, the embedding that is the head too: its gradients are summed, and both take the
    same optimizer step. The owner counts it in the norm and writes it to checkpoints. trained: it is."""

    owner: str
    other: str
    trained: bool = True


def later(part: str) -> str:
    """The name of what an encoder's stages behind the first need of its inputs: all but pixels."""
    return f"{part} behind the first stage"


@dataclass(frozen=True)
class StageGraph:
    """All stages, in the order in which a micro-batch visits them first, all edges between them, and their ties."""

    stages: tuple[StageSpec, ...]
    edges: tuple[Edge, ...]
    ties: tuple[Tie, ...] = ()

    def stage(self, name: str) -> StageSpec:
        """The stage of that name."""
        return next(stage for stage in self.stages if stage.name == name)

    def of_part(self, part: str) -> tuple[StageSpec, ...]:
        """The stages of a part, in order."""
        return tuple(stage for stage in self.stages if stage.part == part)

    def works(self) -> dict[str, int]:
        """Names of what is read in a step, in order, and shards of each: the encoders' inputs, what their later stages
        need of these, and the decoder's inputs."""
        shards = {part: self.of_part(part)[0].degrees.shards for part in self.parts()}
        *before, decoder = shards
        behind = {later(part): shards[part] for part in before if len(self.of_part(part)) > 1}
        return {part: shards[part] for part in before} | behind | {decoder: shards[decoder]}

    def batches(self) -> dict[str, int]:
        """Of what is read in a step, for how many of the decoder's micro-batches each piece is."""
        named = {name: part for part in self.parts() for name in (part, later(part))}
        return {name: self.batch_of(named[name]) for name in self.works()}

    def work_of(self, stage: StageSpec) -> str:
        """The name of what a stage gets of these."""
        first = stage.name == self.of_part(stage.part)[0].name or stage.part == self.parts()[-1]
        return stage.part if first else later(stage.part)

    def ways(self) -> tuple[Way, ...]:
        """Two of each edge, there and back, and two of each tie, from the owner and to it."""
        found = []
        for edge in self.edges:
            source, target = self.stage(edge.source.stage), self.stage(edge.target.stage)
            shards, others = source.degrees.shards, target.degrees.shards
            route = straight(shards) if source.part == target.part else dense(shards, others)
            back = tuple((there, here) for here, there in route.pairs) if edge.gradients else ()
            found += [_way(source, target, route.pairs), _way(target, source, back)]
        for tie in self.ties:
            ranks = tuple((rank, rank) for rank in range(self.stage(tie.owner).degrees.world))
            found += [Way(tie.owner, tie.other, ranks), Way(tie.other, tie.owner, ranks)]
        return tuple(found)

    def tied_way(self, stage: str) -> int:
        """The number of the way on which a stage sends the gradient of the weight that it shares."""
        number = next(n for n, tie in enumerate(self.ties) if stage in (tie.owner, tie.other))
        return 2 * (len(self.edges) + number) + (stage == self.ties[number].other)

    def parts(self) -> tuple[str, ...]:
        """Names of the parts, in order."""
        return tuple(dict.fromkeys(stage.part for stage in self.stages))

    def nodes(self) -> tuple[Node, ...]:
        """All nodes in the order in which a micro-batch visits them."""
        return tuple(self._visits())

    def inputs(self, node: Node) -> tuple[Edge, ...]:
        """Edges that end at a node."""
        return tuple(edge for edge in self.edges if edge.target == node)

    def outputs(self, node: Node) -> tuple[Edge, ...]:
        """Edges that begin at a node."""
        return tuple(edge for edge in self.edges if edge.source == node)

    def batch_of(self, part: str) -> int:
        """Micro-batches of the decoder that are one of a part."""
        return max((e.batch for e in self.edges if self.stage(e.source.stage).part == part), default=1)

    @property
    def gradients_merge(self) -> bool:
        """Whether gradients of several micro-batches of a target go back to its source at once."""
        return any(edge.batch > 1 and edge.gradients for edge in self.edges)

    def ranks_of(self, part: str) -> int:
        """Ranks of all stages of a part."""
        return sum(stage.degrees.world for stage in self.of_part(part))

    def rank_in_part(self, stage: str, rank: int) -> int:
        """The number of a stage's rank among those of all stages of its part."""
        own = self.of_part(self.stage(stage).part)
        return rank + sum(one.degrees.world for one in own[: [one.name for one in own].index(stage)])

    def goes_back(self, node: Node) -> bool:
        """Whether backward visits a node: it, or a node before it, is trained."""
        return self.stage(node.stage).trains or any(edge.gradients for edge in self.inputs(node))

    def sharing(self) -> int:
        """The most stages on one device."""
        devices = [device for stage in self.stages for device in stage.devices]
        return max(devices.count(device) for device in set(devices))

    def device_count(self) -> int:
        """Logical devices of all stages together."""
        return max(stage.devices.stop for stage in self.stages)

    def _visits(self) -> Iterator[Node]:
        for part in self.parts():
            stages = self.of_part(part)
            for chunk in range(len(stages[0].chunks)):
                yield from (Node(stage.name, chunk) for stage in stages)


@dataclass(frozen=True)
class RankDevice:
    """A rank's device: the number of its logical device, and that of its node."""

    device: int
    node: int
