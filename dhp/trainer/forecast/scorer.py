"""Scores of a part's layouts, with layers cut evenly into stages.

A search looks at tens of thousands of layouts. What layouts share is counted once: seconds of units by how a layer's
work is divided, what is kept by how states are cut; layers that are alike are counted together. The rest is arithmetic
of arrays over layouts; what a search chooses is then made a whole forecast of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dhp.config.parts import DECODER, resolved
from dhp.core.graph import StageSpec
from dhp.models.shape import PartShape, sum_shape
from dhp.models.types import Chunk
from dhp.planner.rates import Rates, Work
from dhp.planner.units import Numbers
from dhp.trainer.forecast.counted import Counted, Cut, stage_parameters
from dhp.trainer.forecast.layouts import PartLayout
from dhp.trainer.forecast.loads import RunLoads, text_rows, tower_rows
from dhp.trainer.forecast.machine import Machine
from dhp.trainer.forecast.score import Rows, Scores
from dhp.trainer.forecast.seconds import divided_weights, once_a_step, unit_passes, waits_for_others
from dhp.trainer.forecast.unit_times import Turns, exchanged, seconds_of, stacked, together, turns_of, unit_times
from dhp.trainer.memory import gathered_bytes, loss_bytes, rank_bytes, runtime_bytes
from dhp.trainer.row_bytes import CHOICES, RowBytes

T = TypeVar("T")
_COLUMNS = ("stages", "sums_s", "once_s")


@dataclass(frozen=True, eq=False)
class _Fixed:
    """Of a layout, whatever the rows. kept, passing: bytes of its first and last stage. once_s: without what backward
    hides of sums of gradients, which take sums_s."""

    layout: PartLayout  # kept, so that its id stays its own
    cut: Cut
    stages: int
    kept: tuple[float, ...]
    passing: tuple[float, ...]
    once_s: float
    sums_s: float
    exchanges: Numbers


@dataclass(frozen=True, eq=False)
class _Runs:
    """Runs of layers of so many stages. counts: units of each run by their kinds; layers: those of the first run
    without the ends. held, replay: bytes by rows, of the first and last run and each choice; behind: after the last."""

    counts: Numbers  # [runs, kinds]
    layers: Numbers  # [kinds]
    held: Numbers  # [2, choices, 5]
    replay: Numbers  # [2, choices, 5]
    behind: Numbers  # [2, 5]


class Scorer:
    """Scores of one model on one machine. loads: of a division of a step into rows."""

    def __init__(self, counted: Counted, machine: Machine, loads: Callable[[PartLayout, Rows], RunLoads]):
        self._counted, self._machine, self._loads = counted, machine, loads
        self._known: dict[tuple[object, ...], object] = {}

    def scores(self, layouts: Sequence[PartLayout], rows: Rows, choices: Sequence[str] = CHOICES) -> Scores:
        """Of layouts of one part, each with each choice of recompute. Raises ModelError where what layers keep is not
        known."""
        name = layouts[0].part
        trains = self._counted.trains(name)
        back = trains or (name == DECODER and self._counted.trains_before)
        choices = tuple(choices) if back else ("none",)
        figures = np.zeros((5, len(layouts), len(choices)))
        by_cut: dict[Cut, list[int]] = {}
        fixed = [self._fixed(layout, trains) for layout in layouts]
        for at, own in enumerate(fixed):
            by_cut.setdefault(own.cut, []).append(at)
        for places in by_cut.values():
            figures[:, places] = self._figures([fixed[at] for at in places], rows, choices, back, trains)
        return Scores(layouts, choices, rows, *figures.reshape(5, -1))

    def _figures(
        self, fixed: Sequence[_Fixed], rows: Rows, choices: tuple[str, ...], back: bool, trains: bool
    ) -> Numbers:
        """Of layouts with the same cut. [5, layouts, choices]"""
        layouts = [own.layout for own in fixed]
        rates = self._rates(layouts[0])
        loads = [self._loads(layout, rows) for layout in layouts]
        turns = stacked([self._turns(own, load, choices, rates) for own, load in zip(fixed, loads, strict=True)])
        times = unit_times(turns, np.stack([own.exchanges for own in fixed]), back, rates.ahead)
        of_rows = np.array([self._rows(layout, load) for layout, load in zip(layouts, loads, strict=True)])
        kept, passing = (np.array([getattr(own, name) for own in fixed]) for name in ("kept", "passing"))
        found = np.zeros((5, len(fixed), len(choices)))
        stages, sums_s, once_s = (np.array([getattr(own, name) for own in fixed]) for name in _COLUMNS)
        for count in np.unique(stages):
            at = np.flatnonzero(stages == count)
            runs = self._runs(fixed[int(at[0])], int(count), choices)
            found[0, at] = np.einsum("rk,nkc->nrc", runs.counts, times[at]).max(axis=1)
            if trains:
                hidden = self._hidden_s(turns.back[at] @ runs.layers, sums_s[at], rates)
                found[1, at] = (once_s[at] + hidden)[:, None]
            held = np.einsum("scr,nr->nsc", runs.held, of_rows[at]) * back
            replay = np.einsum("scr,nr->nsc", runs.replay, of_rows[at]) - (of_rows[at] @ runs.behind.T)[:, :, None]
            more = passing[at][:, :, None] + np.maximum(0.0, replay) * back
            fullest = (kept[at][:, :, None] + more + held).argmax(axis=1)[:, None]
            found[2, at] = np.take_along_axis(np.broadcast_to(kept[at][:, :, None], held.shape), fullest, 1)[:, 0]
            found[3, at] = np.take_along_axis(more, fullest, 1)[:, 0]
            found[4, at] = np.take_along_axis(held, fullest, 1)[:, 0]
        return found

    def _hidden_s(self, backward: Numbers, sums_s: Numbers, rates: Rates) -> Numbers:
        """Seconds that sums of gradients, of so many, add to a backward's seconds in turn and of the host.
        backward: [layouts, 2]"""
        alone = together(backward[:, 0], np.zeros_like(sums_s), backward[:, 1], rates.ahead)
        return together(backward[:, 0], sums_s, backward[:, 1], rates.ahead) - alone

    def _once(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]  # type: ignore[assignment]  # each key begins with what makes it
        return found

    def _rates(self, layout: PartLayout) -> Rates:
        return self._machine.of(layout.part, layout.section.dtype)

    def _rows(self, layout: PartLayout, loads: RunLoads) -> tuple[float, ...]:
        own = layout.degrees

        def make() -> tuple[float, ...]:
            rows = (text_rows if layout.part == DECODER else tower_rows)(loads.worst, own)
            return (1.0, rows.tokens, rows.features, rows.targets, rows.patches)

        return self._once(("rows", layout.part, own.data, own.sequence, id(loads)), make)

    def _turns(self, fixed: _Fixed, loads: RunLoads, choices: tuple[str, ...], rates: Rates) -> Turns:
        layout, own = fixed.layout, fixed.layout.degrees
        load: object = id(loads)
        if layout.part == DECODER:
            load = loads.even if waits_for_others(layout.section) else loads.text
        data = 0 if layout.part == DECODER else own.data

        def make() -> Turns:
            passes = unit_passes(self._counted, layout.part, layout.section, own, loads)
            first = self._kinds(layout.part, fixed.cut)
            shares = [[self._counted.replays[layout.part][at].get(c, 0.0) for c in choices] for at in first]
            return turns_of([passes[at] for at in first], shares, choices, rates)

        return self._once(("turns", layout.part, fixed.cut, own.rows, data, choices, load), make)

    def _kinds(self, part: str, cut: Cut) -> dict[int, int]:
        """Units that are alike in all, by the place of the first of them: its number."""

        def make() -> dict[int, int]:
            alike = self._counted.alike(part, cut)
            return {at: number for number, at in enumerate(dict.fromkeys(alike))}

        return self._once(("kinds", part, cut), make)

    def _runs(self, fixed: _Fixed, stages: int, choices: tuple[str, ...]) -> _Runs:
        part, cut = fixed.layout.part, fixed.cut

        def make() -> _Runs:
            kept, kinds, alike = self._counted.keeps(part, cut), self._kinds(part, cut), self._counted.alike(part, cut)
            layers = len(kept.kinds)
            runs = even_runs(layers, stages)
            ones = np.eye(len(kinds))[[kinds[at] for at in alike]]  # [units, kinds]
            whole = [range(r.start + (r.start > 0), r.stop + 1 + (r.stop == layers)) for r in runs]
            ends = (runs[0], runs[-1])
            held = [[_by_rows(kept.held_by(run, choice)) for choice in choices] for run in ends]
            replay = [[_by_rows(kept.replay[kept.kinds[run.stop - 1], choice]) for choice in choices] for run in ends]
            behind = [_by_rows(kept.after if run.stop == layers else RowBytes()) for run in ends]
            first = ones[runs[0].start + 1 : runs[0].stop + 1].sum(axis=0)
            counts = np.array([ones[run.start : run.stop].sum(axis=0) for run in whole])
            return _Runs(np.unique(counts, axis=0), first, np.array(held), np.array(replay), np.array(behind))

        return self._once(("runs", part, cut, stages, choices), make)

    def _fixed(self, layout: PartLayout, trains: bool) -> _Fixed:
        section, own, name = layout.section, layout.degrees, layout.part

        def make() -> _Fixed:
            cut, stages = Cut.of(section), resolved(section.pipeline)
            divided = (name, cut, section.zero_stage, section.zero_engine, own.shards)
            exchanges = self._once(("exchanges", *divided), lambda: self._exchanges(layout, cut))
            states = lambda: self._states(layout, cut, stages, trains)
            return _Fixed(
                layout, cut, stages, *self._once(("states", *divided, own.divided, stages), states), exchanges
            )

        return self._once(("fixed", id(layout)), make)

    def _exchanges(self, layout: PartLayout, cut: Cut) -> Numbers:
        own = self._counted.unit_parameters(layout.part, cut)
        held = [own[at] for at in self._kinds(layout.part, cut)]
        return exchanged(held, layout.section, layout.degrees, self._rates(layout))

    def _states(
        self, layout: PartLayout, cut: Cut, stages: int, trains: bool
    ) -> tuple[tuple[float, ...], tuple[float, ...], float, float]:
        """Bytes between steps, and of the loss and what is gathered, of the first and the last stage; seconds once a
        step, and those of sums of gradients."""
        section, name, own = layout.section, layout.part, layout.degrees
        runs = even_runs(len(self._counted.family.parts[name].layers.kinds), stages)
        specs = [StageSpec(name, name, (run,), own, trains, range(own.world)) for run in (runs[0], runs[-1])]
        shapes = [self._shape(name, cut, spec) for spec in specs]
        each = [self._kept(layout, spec, shape) for spec, shape in zip(specs, shapes, strict=True)]
        kept, passing = zip(*each, strict=True)
        if not trains:
            return kept, passing, 0.0, 0.0
        rates, shape = self._rates(layout), shapes[0]
        states = rank_bytes(section, specs[0], shape)
        once_s = sum(once_a_step(section, own, shape, states, Work(), rates))
        trained = shape.per_rank if shape.trained is None else shape.trained
        if section.zero_stage or not trained:
            return kept, passing, once_s, 0.0
        sums_s = seconds_of(divided_weights(section, own, trained, 0).backward(True), rates)
        return kept, passing, once_s - sums_s, sums_s

    def _shape(self, name: str, cut: Cut, stage: StageSpec) -> PartShape:
        part = self._counted.family.parts[name]

        def make() -> PartShape:
            absent = part.absent((_chunk(stage.chunks[0], len(part.layers.kinds)),))
            selects = bool(self._counted.rules.selects or self._counted.family.idle)
            held = stage_parameters(self._counted.held(name, cut), absent)
            return sum_shape(held, selects, self._counted.optimizer)

        return self._once(("shape", name, cut.tensor, cut.expert, stage.chunks[0]), make)

    def _kept(self, layout: PartLayout, stage: StageSpec, shape: PartShape) -> tuple[float, float]:
        """Bytes between steps, and of the loss and what is gathered."""
        section, part = layout.section, self._counted.family.parts[layout.part]
        head = part.head_shape((_chunk(stage.chunks[0], len(part.layers.kinds)),))
        states = rank_bytes(section, stage, shape).total + (runtime_bytes(stage) if self._machine.contexts else 0)
        logits = loss_bytes(section, head) if head is not None and head.loss else 0
        return float(states), float(logits + gathered_bytes(section, shape, max(1, len(stage.layers)), head))


def even_runs(layers: int, stages: int) -> list[range]:
    """Of layers, one for each stage."""
    bounds = [round(layers * at / stages) for at in range(stages + 1)]
    return [range(first, end) for first, end in zip(bounds, bounds[1:])]


def _chunk(run: range, layers: int) -> Chunk:
    return Chunk(run, run.start == 0, run.stop == layers)


def _by_rows(own: RowBytes) -> tuple[float, ...]:
    return own.fixed, own.tokens, own.features, own.targets, own.patches
