"""Quick figures of a part's layouts: seconds of a step and bytes of a device, with layers cut evenly into stages.

A search looks at tens of thousands of layouts. Layouts that divide a layer's work alike share its seconds, and layers
that are alike are counted together; what a search chooses is then made a whole forecast of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from dhp.config.parts import DECODER, resolved
from dhp.core.graph import StageSpec
from dhp.models.shape import PartShape, sum_shape
from dhp.models.types import Chunk
from dhp.planner.rates import Work
from dhp.trainer.forecast.counted import Counted, Cut, stage_parameters
from dhp.trainer.forecast.layouts import PartLayout
from dhp.trainer.forecast.loads import RunLoads, text_rows, tower_rows
from dhp.trainer.forecast.machine import Machine
from dhp.trainer.forecast.seconds import UnitSeconds, once_a_step, unit_seconds, waits_for_others
from dhp.trainer.memory import gathered_bytes, loss_bytes, rank_bytes, runtime_bytes
from dhp.trainer.row_bytes import CHOICES, RowBytes


@dataclass(frozen=True)
class Rows:
    """A step's division: samples of a row, replicas of the decoder, and micro-batches."""

    micro_batch_size: int
    replicas: int
    micro_batches: int


@dataclass(frozen=True)
class Score:
    """One layout of a part with one choice of recompute.

    micro_batch_s: of the slowest stage and one micro-batch; once_s: once a step.

    kept_bytes: between steps and of contexts, on the fullest rank; passing_bytes: the most that comes and goes beside
    activations; held_bytes: activations of one micro-batch.
    """

    layout: PartLayout
    rows: Rows
    recompute: str
    micro_batch_s: float
    once_s: float
    kept_bytes: float
    passing_bytes: float
    held_bytes: float

    @cached_property
    def pipeline(self) -> int:
        """Stages."""
        return resolved(self.layout.section.pipeline)

    @cached_property
    def seconds(self) -> float:
        """Of a step of the part alone: stages fill and drain with a micro-batch each."""
        return (self.rows.micro_batches + self.pipeline - 1) * self.micro_batch_s + self.once_s

    def bytes(self, ahead: int) -> float:
        """Of its fullest device. ahead: micro-batches that are held at most."""
        return self.kept_bytes + self.passing_bytes + ahead * self.held_bytes


class Scorer:
    """Scores of one model on one machine. loads: of a division of a step into rows."""

    def __init__(self, counted: Counted, machine: Machine, loads: Callable[[PartLayout, Rows], RunLoads]):
        self._counted, self._machine, self._loads = counted, machine, loads
        self._shapes: dict[tuple[object, ...], PartShape] = {}
        self._held: dict[tuple[object, ...], tuple[RowBytes, RowBytes, RowBytes]] = {}
        self._sums: dict[tuple[object, ...], list[float]] = {}
        self._units: dict[tuple[object, ...], tuple[UnitSeconds, ...]] = {}

    def scores(self, layout: PartLayout, rows: Rows, choices: Sequence[str] = CHOICES) -> Iterator[Score]:
        """One for each choice of recompute. Raises ModelError where what layers keep is not known."""
        section, name = layout.section, layout.part
        loads = self._loads(layout, rows)
        units = self._unit_seconds(layout, rows, loads)
        trains = self._counted.trains(name)
        back = trains or (name == DECODER and self._counted.trains_before)
        runs = _even_runs(len(units) - 2, resolved(section.pipeline))
        stages = [self._stage(layout, run, trains) for run in dict.fromkeys((runs[0], runs[-1]))]
        shapes = [self._shape(layout, stage) for stage in stages]
        kept = [self._kept(layout, stage, shape) for stage, shape in zip(stages, shapes, strict=True)]
        once = self._once(layout, stages[0], shapes[0], units) if trains else 0.0
        for choice in choices if back else ("none",):
            seconds = self._slowest(units, runs, choice, back)
            held = [self._activations(layout, stage, loads, choice) if back else (0.0, 0.0) for stage in stages]
            passing = [more + again for (_, more), (_, again) in zip(kept, held, strict=True)]
            full = max(range(len(stages)), key=lambda at: kept[at][0] + passing[at] + held[at][0])
            yield Score(layout, rows, choice, seconds, once, kept[full][0], passing[full], held[full][0])

    def _unit_seconds(self, layout: PartLayout, rows: Rows, loads: RunLoads) -> tuple[UnitSeconds, ...]:
        section = layout.section
        waits = (section.zero_stage, section.zero_engine) if waits_for_others(section) else ()
        key = (layout.part, Cut.of(section), layout.degrees, waits, id(loads))
        if key not in self._units:
            rates = self._machine.of(layout.part, section.dtype)
            self._units[key] = unit_seconds(self._counted, layout.part, section, layout.degrees, loads, rates)
        return self._units[key]

    def _slowest(self, units: tuple[UnitSeconds, ...], runs: Sequence[range], choice: str, back: bool) -> float:
        """Seconds of a micro-batch in the run that takes longest."""
        key = (id(units), choice)
        if key not in self._sums:
            each = {unit: _both_s(unit, choice, back) for unit in set(units)}
            self._sums[key] = [0.0, *accumulate(each[unit] for unit in units)]
        sums, last = self._sums[key], len(units) - 2
        return max(sums[run.stop + 1 + (run.stop == last)] - sums[run.start + (run.start > 0)] for run in runs)

    def _stage(self, layout: PartLayout, run: range, trains: bool) -> StageSpec:
        return StageSpec(layout.part, layout.part, (run,), layout.degrees, trains, range(layout.degrees.world))

    def _absent(self, stage: StageSpec) -> tuple[str, ...]:
        part, run = self._counted.family.parts[stage.part], stage.chunks[0]
        return part.absent((_chunk(run, len(part.layers.kinds)),))

    def _shape(self, layout: PartLayout, stage: StageSpec) -> PartShape:
        cut = Cut.of(layout.section)
        key = (layout.part, cut.tensor, cut.expert, stage.chunks[0])
        if key not in self._shapes:
            held = self._counted.held(layout.part, cut)
            selects = bool(self._counted.rules.selects or self._counted.family.idle)
            self._shapes[key] = sum_shape(stage_parameters(held, self._absent(stage)), selects)
        return self._shapes[key]

    def _kept(self, layout: PartLayout, stage: StageSpec, shape: PartShape) -> tuple[float, float]:
        """Bytes between steps, and of the loss and what is gathered."""
        section, part = layout.section, self._counted.family.parts[layout.part]
        head = part.head_shape((_chunk(stage.chunks[0], len(part.layers.kinds)),))
        states = rank_bytes(section, stage, shape).total + (runtime_bytes(stage) if self._machine.contexts else 0)
        logits = loss_bytes(section, head) if head is not None and head.loss else 0
        return float(states), float(logits + gathered_bytes(section, shape, max(1, len(stage.layers)), head))

    def _activations(self, layout: PartLayout, stage: StageSpec, loads: RunLoads, choice: str) -> tuple[float, float]:
        """Held of one micro-batch, and the replay of the last layer beyond what is freed by then."""
        cut, run = Cut.of(layout.section), stage.chunks[0]
        key = (layout.part, cut, run, choice)
        if key not in self._held:
            kept = self._counted.keeps(layout.part, cut)
            ends = kept.after if run.stop == len(kept.kinds) else RowBytes()
            self._held[key] = kept.held_by(run, choice), kept.replay[kept.kinds[run.stop - 1], choice], ends
        rows = (text_rows if layout.part == DECODER else tower_rows)(loads.worst, layout.degrees)
        held, replay, behind = (one.of(rows) for one in self._held[key])
        return held, max(0.0, replay - behind)

    def _once(self, layout: PartLayout, stage: StageSpec, shape: PartShape, units: Sequence[UnitSeconds]) -> float:
        section = layout.section
        behind = Work()
        for unit, count in Counter(units[at + 1] for at in stage.layers).items():
            behind = behind + replace(unit.passes.backward, hidden=()) * count
        states = rank_bytes(section, stage, shape)
        rates = self._machine.of(layout.part, section.dtype)
        return sum(once_a_step(section, layout.degrees, shape, states, behind, rates))


def _both_s(unit: UnitSeconds, choice: str, back: bool) -> float:
    """Forward and, where there is one, backward."""
    return unit.forward.total + (unit.backward.total + unit.again_s(choice) if back else 0.0)


def _even_runs(layers: int, stages: int) -> list[range]:
    bounds = [round(layers * at / stages) for at in range(stages + 1)]
    return [range(first, end) for first, end in zip(bounds, bounds[1:])]


def _chunk(run: range, layers: int) -> Chunk:
    return Chunk(run, run.start == 0, run.stop == layers)
