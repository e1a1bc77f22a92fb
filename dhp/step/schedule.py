"""Orders a step's actions: schedules that print and compare.

A *program* is what one stage does, in its order. The programs of all stages, merged, are a schedule; its clock table
(rows stages, columns time) is what the papers draw. Sources: GPipe (Huang et al. 2019, section 2.3), 1F1B
(Narayanan et al. 2019, "PipeDream", section 3.2), interleaved 1F1B (Narayanan et al. 2021, section 2.2)."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dhp.config.ranges import GPIPE, INTERLEAVED, ONE_F_ONE_B, SEQUENTIAL, VISION_AHEAD
from dhp.core.errors import ConfigError
from dhp.core.graph import Edge, Node, StageGraph, StageSpec


@dataclass(frozen=True)
class Forward:
    """Run a micro-batch forward through a node."""

    node: Node
    micro_batch: int

    def __str__(self) -> str:
        return f"F {self.node} {self.micro_batch}"


@dataclass(frozen=True)
class Backward:
    """Run a micro-batch backward through a node."""

    node: Node
    micro_batch: int

    def __str__(self) -> str:
        return f"B {self.node} {self.micro_batch}"


Action = Forward | Backward
Schedule = tuple[Action, ...]
Programs = Mapping[str, Sequence[Action]]  # of each stage, by name


def make_schedule(kind: str, graph: StageGraph, micro_batches: int) -> Schedule:
    """The actions of all stages in an order in which each finds what it needs.

    kind: of `training.schedule`. vision_ahead is 1f1b by another name: a graph of vision and text alone has a warm-up
    of one micro-batch, which vision encodes while text works on the one before.

    Raises ConfigError where an interleaved schedule has no whole groups of micro-batches."""
    if kind == SEQUENTIAL:
        batch = max(map(graph.batch_of, graph.parts()))
        groups = [range(first, min(first + batch, micro_batches)) for first in range(0, micro_batches, batch)]
        return tuple(action for at, group in enumerate(groups) for action in _there_and_back(graph, at, group))
    return tuple(action for tick in clock(make_programs(kind, graph, micro_batches), graph) for action in tick)


def make_programs(kind: str, graph: StageGraph, micro_batches: int) -> dict[str, list[Action]]:
    """Each stage's program: the last part as `kind` says, those before it as far ahead as it needs them and one more.
    Of an encoder that is a pipeline itself, each stage is one micro-batch further ahead than the one behind it: with
    1F1B the stages of both parts make one chain. An encoder that takes several micro-batches of the decoder at a time
    counts in its own.

    Frozen stages go forward in the same order, without backward."""
    *encoders, last = graph.parts()
    pipeline = graph.of_part(last)
    order = _PROGRAMS[kind](pipeline, micro_batches)
    needed = micro_batches if kind == GPIPE else _needed_ahead(order[pipeline[0].name])
    ahead = {}
    for part in encoders:
        batch = graph.batch_of(part)
        limit = -(-needed // batch) + (kind != GPIPE)
        for further, stage in enumerate(reversed(graph.of_part(part))):
            ahead[stage.name] = _ahead(stage, -(-micro_batches // batch), limit + further)
    programs = ahead | order
    return {
        stage.name: [a for a in programs[stage.name] if isinstance(a, Forward) or graph.goes_back(a.node)]
        for stage in graph.stages
    }


def clock(programs: Programs, graph: StageGraph) -> list[list[Action]]:
    """The programs by time: each stage takes its next action as soon as what it needs was done before; every action
    takes one unit. Raises ValueError for programs that wait for one another."""
    left, count = {name: list(program) for name, program in programs.items()}, count_micro_batches(programs, graph)
    done: set[Action] = set()
    ticks: list[list[Action]] = []
    while any(left.values()):
        tick = [p[0] for p in left.values() if p and done.issuperset(need for need, _ in needs(p[0], graph, count))]
        if not tick:
            waiting = ", ".join(f"{name} before {program[0]}" for name, program in left.items() if program)
            raise ValueError(f"the programs wait for one another: {waiting}")
        for action in tick:
            left[action.node.stage].pop(0)
        done.update(tick)
        ticks.append(tick)
    return ticks


def count_micro_batches(programs: Programs, graph: StageGraph) -> int:
    """Of a step, as the decoder counts them."""
    stages = [stage.name for stage in graph.of_part(graph.parts()[-1])]
    return 1 + max((action.micro_batch for name in stages for action in programs.get(name, ())), default=-1)


def draw(schedule: Schedule, graph: StageGraph, again: Collection[str] = ()) -> str:
    """The clock table: a row for each stage, a column for each unit of time. `0` is micro-batch 0 forward, `0'` its
    backward, `0b` and `0b'` the same in the stage's second chunk. again: stages that recompute some of their layers:
    `0"` is a backward before which they go forward again (Yao et al. 2025, "OmniBal", figure 3)."""
    programs: dict[str, list[Action]] = {stage.name: [] for stage in graph.stages}
    for action in schedule:
        programs[action.node.stage].append(action)
    ticks = clock(programs, graph)
    cells = {stage.name: ["."] * len(ticks) for stage in graph.stages}
    for at, tick in enumerate(ticks):
        for action in tick:
            cells[action.node.stage][at] = cell(action, again)
    return rows(cells)


def rows(cells: Mapping[str, Sequence[str]]) -> str:
    """A line for each stage of as many cells, columns aligned."""
    widths = [max(map(len, column)) for column in zip(*cells.values())]
    longest = max(map(len, cells))
    lines = (f"{name:{longest}} " + " ".join(c.ljust(w) for c, w in zip(own, widths)) for name, own in cells.items())
    return "\n".join(line.rstrip() for line in lines)


def cell(action: Action, again: Collection[str] = ()) -> str:
    """What `draw` has for an action."""
    chunk = "abcdefgh"[action.node.chunk] if action.node.chunk else ""
    way = "" if isinstance(action, Forward) else '"' if action.node.stage in again else "'"
    return f"{action.micro_batch}{chunk}{way}"


def outstanding(schedule: Schedule, graph: StageGraph) -> dict[str, dict[str, int]]:
    """For each stage, how many micro-batches each stage holds at most while that one works, itself included.

    A stage holds a micro-batch, of each of its chunks, from its forward to its backward; one without backward none."""
    held = dict.fromkeys((stage.name for stage in graph.stages), 0)
    most = {name: dict.fromkeys(held, 0) for name in held}
    for action in schedule:
        stage = action.node.stage
        keeps = graph.goes_back(action.node)
        held[stage] += 1 if isinstance(action, Forward) and keeps else 0
        most[stage] = {name: max(most[stage][name], count) for name, count in held.items()}
        held[stage] -= 1 if isinstance(action, Backward) else 0
    return most


def without_idle(schedule: Schedule, idle: Callable[[Action], bool]) -> Schedule:
    """The schedule without the actions that have no work in a step, as encoders have none without an image."""
    return tuple(action for action in schedule if not idle(action))


def last_backwards(schedule: Schedule) -> frozenset[int]:
    """Indices in the schedule of each stage's last backward in the step, where its gradients are complete."""
    last: dict[str, int] = {}
    for at, action in enumerate(schedule):
        if isinstance(action, Backward):
            last[action.node.stage] = at
    return frozenset(last.values())


def _there_and_back(graph: StageGraph, number: int, group: range) -> Iterator[Action]:
    """A group of micro-batches, one behind another there and back in the last part. Encoders take all of them at a
    time, in a pass of that number."""
    *encoders, _ = graph.parts()
    before, behind = (
        [node for node in graph.nodes() if (graph.stage(node.stage).part in encoders) is inside]
        for inside in (True, False)
    )
    yield from (Forward(node, number) for node in before)
    for m in group:
        yield from (Forward(node, m) for node in behind)
        yield from (Backward(node, m) for node in reversed(behind) if graph.goes_back(node))
    yield from (Backward(node, number) for node in reversed(before) if graph.goes_back(node))


def _gpipe(stages: Sequence[StageSpec], micro_batches: int) -> dict[str, list[Action]]:
    return {s.name: _one_f_one_b(s, micro_batches, warmup=micro_batches) for s in stages}


def _pipedream(stages: Sequence[StageSpec], micro_batches: int) -> dict[str, list[Action]]:
    """A stage goes forward once for each stage after it, then in turn forward and back."""
    count = len(stages)
    return {s.name: _one_f_one_b(s, micro_batches, warmup=count - 1 - at) for at, s in enumerate(stages)}


def _one_f_one_b(stage: StageSpec, micro_batches: int, warmup: int) -> list[Action]:
    node, warmup = stage.nodes[0], min(warmup, micro_batches)
    forwards = [Forward(node, m) for m in range(micro_batches)]
    backwards = [Backward(node, m) for m in range(micro_batches)]
    return _in_turn(forwards, backwards, warmup)


def check_groups(part: str, pipeline: int, micro_batches: int) -> None:
    """An interleaved schedule takes micro-batches in groups of as many as the part has stages. Raises ConfigError."""
    if micro_batches % pipeline:
        raise ConfigError(
            f"training.schedule=interleaved takes micro-batches in groups of {part}.pipeline({pipeline}), but a step "
            f"has {micro_batches}: micro-batches({micro_batches}) % pipeline({pipeline}) = {micro_batches % pipeline} "
            "!= 0. Choose training.batch_size and training.micro_batch_size so that it is a multiple, or training."
            f"schedule=1f1b with {part}.virtual_stages=1"
        )


def _interleaved(stages: Sequence[StageSpec], micro_batches: int) -> dict[str, list[Action]]:
    """As 1F1B, over chunks: a stage takes as many micro-batches as there are stages through its first chunk, then the
    same through its second, and so on, so that each stage begins and ends earlier."""
    count, chunks = len(stages), len(stages[0].chunks)
    check_groups(stages[0].part, count, micro_batches)
    visits = [
        (chunk, group * count + m)
        for group in range(micro_batches // count)
        for chunk in range(chunks)
        for m in range(count)
    ]
    programs = {}
    for at, stage in enumerate(stages):
        forwards = [Forward(Node(stage.name, chunk), m) for chunk, m in visits]
        backwards = [Backward(Node(stage.name, chunks - 1 - chunk), m) for chunk, m in visits]
        warmup = 2 * (count - 1 - at) + (chunks - 1) * count
        programs[stage.name] = _in_turn(forwards, backwards, min(warmup, len(visits)))
    return programs


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then one of each in turn, then the backwards that are left."""
    pairs = [action for pair in zip(forwards[warmup:], backwards) for action in pair]
    return [*forwards[:warmup], *pairs, *backwards[len(forwards) - warmup :]]


def _ahead(stage: StageSpec, micro_batches: int, limit: int) -> list[Action]:
    """Forward until `limit` micro-batches are in flight, then in turn back and forward."""
    return _one_f_one_b(stage, micro_batches, warmup=limit - 1)


def _needed_ahead(program: Sequence[Action]) -> int:
    """The most micro-batches that the first stage of a pipeline takes in beyond those that it has sent back."""
    node, held, most = program[0].node, 0, 0
    for action in program:
        if action.node == node:
            held += 1 if isinstance(action, Forward) else -1
            most = max(most, held)
    return most


def needs(action: Action, graph: StageGraph, count: int) -> list[tuple[Action, Edge | None]]:
    """The actions that must be done before, each with the edge over which what it makes is handed on; None where the
    stage keeps it itself. Forward follows the edges, backward goes against them. count: micro-batches of the step."""
    m = action.micro_batch
    if isinstance(action, Forward):
        return [(Forward(edge.source, m // edge.batch), edge) for edge in graph.inputs(action.node)]
    edges = [edge for edge in graph.outputs(action.node) if edge.gradients]
    back = [(Backward(edge.target, number), edge) for edge in edges for number in edge.of_target(m, count)]
    return [(Forward(action.node, m), None), *back]


_PROGRAMS: dict[str, Callable[[Sequence[StageSpec], int], dict[str, list[Action]]]] = {
    GPIPE: _gpipe,
    ONE_F_ONE_B: _pipedream,
    VISION_AHEAD: _pipedream,
    INTERLEAVED: _interleaved,
}
