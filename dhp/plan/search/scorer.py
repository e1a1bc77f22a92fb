"""Scores many layouts of a part at once, as arrays: the search's speed.

The sums are those of `dhp.plan.forecast`, to which tests/plan/search/test_layouts.py holds them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from dhp.config.parts import DECODER, resolved
from dhp.config.schema import PartConfig
from dhp.core.axes import Degrees
from dhp.core.graph import StageSpec
from dhp.models.shape import PartShape, sum_shape
from dhp.models.types import Chunk
from dhp.plan.bench.machine import Machine
from dhp.plan.count.counted_model import Counted, Cut, stage_parameters
from dhp.plan.count.loads import RunLoads, text_rows, tower_rows
from dhp.plan.count.rates import OVERLAP, Operations, Rates, Transfer
from dhp.plan.count.row_bytes import CHOICES, RowBytes
from dhp.plan.count.seconds import divided_weights, once_a_step, unit_passes, waits_for_others, with_weights
from dhp.plan.count.state_bytes import gathered_moments, loss_bytes, rank_bytes, runtime_bytes
from dhp.plan.count.unit_work import Passes, recomputed
from dhp.plan.cut.units import Numbers
from dhp.plan.search.layouts import PartLayout


@dataclass(frozen=True)
class Rows:
    """A step's division: samples of a row, replicas of the decoder, and micro-batches, so many of which are one pass of
    a tower."""

    micro_batch_size: int
    replicas: int
    micro_batches: int
    batch: int = 1


@dataclass(frozen=True)
class Score:
    """One layout of a part with one choice of recompute.

    micro_batch_s: of the slowest stage and one micro-batch, a tower's share of a pass; once_s: once a step.

    kept_bytes: between steps and of contexts, on the fullest rank; passing_bytes: the most that comes and goes beside
    activations; held_bytes: activations of one micro-batch, of a tower of a pass."""

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

    def bytes(self, ahead: int) -> float:
        """Of its fullest device. ahead: micro-batches that are held at most."""
        return self.kept_bytes + self.passing_bytes + ahead * self.held_bytes


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of layouts of one part for one division of a step, as arrays: of each layout with each choice."""

    layouts: Sequence[PartLayout]
    choices: Sequence[str]
    rows: Rows
    micro_batch_s: Numbers  # [layouts × choices], as all below
    once_s: Numbers
    kept: Numbers
    passing: Numbers
    held: Numbers

    def __len__(self) -> int:
        return len(self.micro_batch_s)

    def score(self, at: int) -> Score:
        """The one at a place of the arrays."""
        layout, choice = divmod(at, len(self.choices))
        figures = (self.micro_batch_s, self.once_s, self.kept, self.passing, self.held)
        own = (float(figure[at]) for figure in figures)
        return Score(self.layouts[layout], self.rows, self.choices[choice], *own)

    @cached_property
    def stages(self) -> Numbers:
        each = np.array([resolved(layout.section.pipeline) for layout in self.layouts], dtype=np.float64)
        return each.repeat(len(self.choices))

    @cached_property
    def numbers(self) -> np.ndarray:
        """What distinguishes layouts."""
        return np.array([id(layout) for layout in self.layouts], dtype=np.int64).repeat(len(self.choices))

    @cached_property
    def front(self) -> np.ndarray:
        """Places of those that no other beats in seconds and bytes."""
        seconds = (self.rows.micro_batches + self.stages - 1) * self.micro_batch_s + self.once_s
        taken = self.kept + self.passing + self.held
        order = np.lexsort((taken, seconds))
        before = np.minimum.accumulate(taken[order])
        leads = np.ones(len(order), dtype=bool)
        leads[1:] = taken[order][1:] < before[:-1]
        return order[leads]


@dataclass(frozen=True)
class Turns:
    """Of units of a micro-batch, before weights and gradients are exchanged: seconds of what is done in turn, and of
    the host. there, back: of each unit; again: of each unit and choice of recompute, that its backward has besides."""

    there: Numbers  # [2, units]
    back: Numbers  # [2, units]
    again: Numbers  # [2, units, choices]


def turns_of(
    passes: Sequence[Passes], shares: Sequence[Sequence[float]], choices: Sequence[str], rates: Rates
) -> Turns:
    """shares: of a forward that each choice runs again, of each unit."""
    there, back = (
        np.array([_in_turn(getattr(one, name), rates) for one in passes]).T for name in ("forward", "backward")
    )
    again = np.array(
        [
            [_again(one.forward, choice, share, rates) for choice, share in zip(choices, own, strict=True)]
            for one, own in zip(passes, shares, strict=True)
        ]
    )
    return Turns(there, back, np.moveaxis(again, 2, 0))


def _again(forward: Operations, choice: str, share: float, rates: Rates) -> tuple[float, float]:
    return _in_turn(recomputed(forward, choice, share), rates) if share else (0.0, 0.0)


def _in_turn(work: Operations, rates: Rates) -> tuple[float, float]:
    done = work.products / rates.products + work.attention / rates.attention + work.elementwise / rates.elementwise
    return done + seconds_of(work.sent, rates), work.launched * rates.host_s


def seconds_of(sends: Sequence[Transfer], rates: Rates) -> float:
    """Of all of them, one after another."""
    return sum(one.seconds(rates) for one in sends)


def exchanged(held: Sequence[tuple[int, int]], section: PartConfig, degrees: Degrees, rates: Rates) -> Numbers:
    """Seconds of weights and gradients that a micro-batch exchanges, of units that hold so many parameters and of these
    so many of experts: hidden in a forward, hidden in a backward, and waited for there. [3, units]"""
    found = []
    for counts in held:
        own = with_weights(Passes(Operations(), Operations()), *counts, section, degrees)
        sends = (own.forward.hidden, own.backward.hidden, own.backward.sent)
        found.append([seconds_of(one, rates) for one in sends])
    return np.array(found).T


def unit_times(turns: Turns, more: Numbers, back: bool, ahead: bool) -> Numbers:
    """Seconds of each unit's passes over a micro-batch, by choice of recompute. turns: of layouts along a first axis of
    each; more: see `exchanged`. back: there is a backward. ahead: see `Rates`. [layouts, units, choices]"""
    there = together(turns.there[:, 0], more[:, 0], turns.there[:, 1], ahead)[..., None]
    if not back:
        return np.broadcast_to(there, (*there.shape[:-1], turns.again.shape[-1]))
    waits, host = (turns.back[:, 0] + more[:, 2])[..., None], turns.back[:, 1][..., None]
    again = together(waits + turns.again[:, 0], more[:, 1][..., None], host + turns.again[:, 1], ahead)
    return there + again


def together(in_turn: Numbers, hidden: Numbers, host: Numbers, ahead: bool) -> Numbers:
    """As `dhp.plan.count.rates.spend` joins them."""
    if not ahead:
        return in_turn + hidden + host
    most = np.maximum(np.maximum(in_turn, hidden), host)
    scale = np.where(most > 0, most, 1.0)
    parts = ((one / scale) ** OVERLAP for one in (in_turn, hidden, host))
    found: Numbers = most * sum(parts) ** (1 / OVERLAP)
    return found


def stacked(each: Sequence[Turns]) -> Turns:
    """Along a first axis."""
    return Turns(*(np.stack([getattr(one, name) for one in each]) for name in ("there", "back", "again")))


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
        passes = rows.micro_batches if layouts[0].part == DECODER else -(-rows.micro_batches // rows.batch)
        turns = stacked([self._turns(own, load, choices, rates) for own, load in zip(fixed, loads, strict=True)])
        times = unit_times(turns, np.stack([own.exchanges for own in fixed]), back, rates.ahead)
        of_rows = np.array([self._rows(layout, load) for layout, load in zip(layouts, loads, strict=True)])
        kept, passing = (np.array([getattr(own, name) for own in fixed]) for name in ("kept", "passing"))
        found = np.zeros((5, len(fixed), len(choices)))
        stages, sums_s, once_s = (np.array([getattr(own, name) for own in fixed]) for name in _COLUMNS)
        for count in np.unique(stages):
            at = np.flatnonzero(stages == count)
            runs = self._runs(fixed[int(at[0])], int(count), choices)
            found[0, at] = np.einsum("rk,nkc->nrc", runs.counts, times[at]).max(axis=1) * passes / rows.micro_batches
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
        own, experts = (self._counted.unit_parameters(layout.part, cut, experts=only) for only in (False, True))
        held = [(own[at], experts[at]) for at in self._kinds(layout.part, cut)]
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
        once_s = sum(once_a_step(section, own, shape, states, Operations(), rates))
        trained = shape.per_rank if shape.trained is None else shape.trained
        if section.zero_stage or not trained:
            return kept, passing, once_s, 0.0
        sums_s = seconds_of(divided_weights(section, own, trained, 0, shape.trained_experts).backward(True), rates)
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
        units = self._counted.units_of(stage, Cut.of(section))
        whole = gathered_moments(section, shape, units, stage.degrees.shards, self._machine.contexts)
        return float(states), max(logits + max(whole.loss, whole.after), whole.most)  # the loss is over amid backward


def even_runs(layers: int, stages: int) -> list[range]:
    """Of layers, one for each stage."""
    bounds = [round(layers * at / stages) for at in range(stages + 1)]
    return [range(first, end) for first, end in zip(bounds, bounds[1:])]


def _chunk(run: range, layers: int) -> Chunk:
    return Chunk(run, run.start == 0, run.stop == layers)


def _by_rows(own: RowBytes) -> tuple[float, ...]:
    return own.fixed, own.tokens, own.features, own.targets, own.patches
