"""Plays a step's programs in seconds.

Where every action takes one unit and every stage has devices of its own, this is the clock table of
`dhp.step.schedule`. Stages that share a device take turns there: one action at a time, the one that can begin first."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from dhp.core.graph import Edge, StageGraph
from dhp.step.schedule import Action, Backward, Programs, cell, count_micro_batches, needs, rows

Seconds = Callable[[Action], float]
Hop = Callable[[Edge, bool], float]  # an edge, and whether gradients go back over it → seconds on the way


def no_time(edge: Edge, back: bool) -> float:
    """A hand-over that takes none."""
    return 0.0


@dataclass(frozen=True)
class ActionTime:
    """One action from start_s to end_s, in seconds since the step began.

    waited_s: in which its stage's devices had no work before it; waited_for: the stage whose work came last, None where
    it waited for none."""

    action: Action
    start_s: float
    end_s: float
    waited_s: float
    waited_for: str | None


@dataclass(frozen=True)
class Timeline:
    """A step. spans: in the order in which they begin. step_s: until the last ends. busy_s: by device. on: by stage,
    its devices."""

    spans: tuple[ActionTime, ...]
    step_s: float
    busy_s: Mapping[int, float]
    on: Mapping[str, range]

    @property
    def bubble(self) -> float:
        """The share of the step in which a device has no work, on average."""
        idle = sum(self.step_s - busy for busy in self.busy_s.values())
        return idle / (self.step_s * len(self.busy_s)) if self.step_s else 0.0

    def idle(self, device: int) -> float:
        """The share of the step in which this device has no work."""
        return 1 - self.busy_s[device] / self.step_s if self.step_s else 0.0

    def waits(self) -> dict[str, dict[str, float]]:
        """By stage, the seconds that its devices had no work because another stage's was not there yet; what is left of
        a step when a stage is done, under the stage that ends last."""
        found: dict[str, dict[str, float]] = {stage: {} for stage in self.on}
        for span in self.spans:
            if span.waited_for is not None and span.waited_s > 0:
                own = found[span.action.node.stage]
                own[span.waited_for] = own.get(span.waited_for, 0.0) + span.waited_s
        last = max(self.spans, key=lambda span: span.end_s, default=None)
        for stage, devices in self.on.items():
            ends = [span.end_s for span in self.spans if set(devices) & set(self.on[span.action.node.stage])]
            left = self.step_s - max(ends, default=0.0)
            if last is not None and left > 0:
                ending = last.action.node.stage
                found[stage][ending] = found[stage].get(ending, 0.0) + left
        return found


def play(programs: Programs, graph: StageGraph, seconds: Seconds, hop: Hop = no_time, apart: bool = False) -> Timeline:
    """Each stage takes its next action as soon as its devices are free and what it needs has arrived. A hand-over keeps
    the receiver waiting, not the sender. apart: every stage has devices of its own, whatever the graph says.

    Raises ValueError for programs that wait for one another."""
    return _Play(programs, graph, seconds, hop, _devices(graph, apart)).run()


def _devices(graph: StageGraph, apart: bool) -> dict[str, range]:
    if apart:
        return {stage.name: range(at, at + 1) for at, stage in enumerate(graph.stages)}
    return {stage.name: stage.devices for stage in graph.stages}


class _Play:
    def __init__(self, programs: Programs, graph: StageGraph, seconds: Seconds, hop: Hop, on: Mapping[str, range]):
        self._left = {name: list(reversed(program)) for name, program in programs.items()}
        self._graph, self._seconds, self._hop, self._on = graph, seconds, hop, on
        self._count = count_micro_batches(programs, graph)
        self._free = {device: 0.0 for devices in on.values() for device in devices}
        self._busy = dict.fromkeys(self._free, 0.0)
        self._ends: dict[Action, float] = {}
        self._spans: list[ActionTime] = []
        self._arrivals: dict[Action, tuple[float, str | None]] = {}  # of the stages' next actions, once known

    def run(self) -> Timeline:
        while any(self._left.values()):
            ready = [span for name, program in self._left.items() if program and (span := self._next(name))]
            if not ready:
                waiting = ", ".join(f"{name} before {program[-1]}" for name, program in self._left.items() if program)
                raise ValueError(f"the programs wait for one another: {waiting}")
            self._take(min(ready, key=lambda span: span.start_s))  # of several, the stage's that comes first
        spans = tuple(sorted(self._spans, key=lambda span: span.start_s))
        return Timeline(spans, max((span.end_s for span in spans), default=0.0), self._busy, self._on)

    def _take(self, span: ActionTime) -> None:
        stage = span.action.node.stage
        self._left[stage].pop()
        self._ends[span.action] = span.end_s
        self._spans.append(span)
        for device in self._on[stage]:
            self._free[device] = span.end_s
            self._busy[device] += span.end_s - span.start_s

    def _next(self, stage: str) -> ActionTime | None:
        """The stage's next action, where all that it needs is under way."""
        action = self._left[stage][-1]
        if action not in self._arrivals:
            arrival = self._arrival(action)
            if arrival is None:
                return None
            self._arrivals[action] = arrival
        arrives, sender = self._arrivals[action]
        free = max(self._free[device] for device in self._on[stage])
        start = max(free, arrives)
        return ActionTime(
            action, start, start + self._seconds(action), start - free, sender if arrives > free else None
        )

    def _arrival(self, action: Action) -> tuple[float, str | None] | None:
        """When all is there that the action needs, and the stage that the last of it comes from; None while that is
        unknown."""
        arrives: tuple[float, str | None] = (0.0, None)
        for need, edge in needs(action, self._graph, self._count):
            if need not in self._ends:
                return None
            on_the_way = 0.0 if edge is None else self._hop(edge, isinstance(action, Backward))
            arrives = max(arrives, (self._ends[need] + on_the_way, need.node.stage), key=lambda one: one[0])
        return arrives


def draw_timeline(timeline: Timeline, stages: Sequence[str], column_s: float, again: Collection[str] = ()) -> str:
    """The step as a table, a row for each stage, column_s seconds a column: an action begins with what `draw` has for
    it, and `-` fills the rest of its time. With one second for each action and column this is what `draw` draws. again:
    see there."""
    columns = max(1, round(timeline.step_s / column_s))
    cells = {stage: ["."] * columns for stage in stages}
    for span in timeline.spans:
        first = min(round(span.start_s / column_s), columns - 1)
        end = max(first + 1, round(span.end_s / column_s))
        own = cells[span.action.node.stage]
        own[first:end] = [cell(span.action, again), *["-"] * (end - first - 1)]
    return rows(cells)
