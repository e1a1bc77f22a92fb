"""Cuts parts into stages: each alone, or one chain."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isinf

import numpy as np

from dhp.config.devices import GIB
from dhp.config.layout import BMP, EXACT, LAYERS, PARAMETERS, read_choices
from dhp.config.model_rules import check_runs
from dhp.config.parts import DECODER, decoder, degrees, encoders, parts, resolved
from dhp.config.ranges import INTERLEAVED, ONE_F_ONE_B, SEQUENTIAL
from dhp.config.schema import Config, PartConfig
from dhp.config.steps import micro_batches
from dhp.core.errors import ConfigError, ModelError
from dhp.models.family import VISION
from dhp.plan.batches import assumed_rows
from dhp.plan.bench.machine import Machine, expected_machine
from dhp.plan.count.counted_model import Counted, Cut
from dhp.plan.count.loads import RunLoads, text_rows, tower_rows
from dhp.plan.count.row_bytes import CHOICES, NONE
from dhp.plan.count.samples import assumed_samples
from dhp.plan.count.seconds import UnitSeconds, unit_seconds
from dhp.plan.count.state_bytes import VALUE_BYTES
from dhp.plan.count.unit_work import hidden_width, tower_width
from dhp.plan.cut.bmp import PARTITION_METHODS, Score, bmp, by_layers, by_parameters
from dhp.plan.cut.exact import exact
from dhp.plan.cut.problem import Partition, PartitionProblem
from dhp.plan.cut.run_tables import make_tables, steps_of
from dhp.plan.cut.simulate import Programs, chain_programs, pipeline_programs
from dhp.plan.cut.trials import PartTimes, Trials, timed
from dhp.plan.cut.units import PinnedUnit, Saved, StageLink, Unit, layer_cuts
from dhp.plan.trainable import trained_stage


class PartUnits:
    """Units of the parts of one run. Rows are assumed, as before any sample is read; the devices are those that a dry
    run names."""

    def __init__(self, config: Config, counted: Counted):
        """config: resolved."""
        self._config, self._counted = config, counted
        alone = replace(config, training=replace(config.training, vision_batch=1))  # by micro-batches of the decoder
        samples = assumed_samples(config, counted.family)
        self._loads: RunLoads = samples.loads(alone)
        self._worst = samples.loads(config).worst
        self._machine: Machine = expected_machine(config, counted.family, self._loads)

    @property
    def link(self) -> StageLink:
        """Between two stages."""
        return StageLink(self._machine.handover.bytes_s, self._machine.handover.latency_s)

    @property
    def note(self) -> str:
        """Where seconds are from, if not from data sheets."""
        return ", by rates measured before" if self._machine.measured else ""

    def of(self, name: str, keeps: bool = False) -> tuple[Unit, ...]:
        """What precedes the layers, each layer, and what follows them; the outer two stay with their neighbours, and
        nothing is cut behind the last: in a chain the next part goes on there. keeps: with what they keep of a
        micro-batch, under each choice of recompute where the part has auto. Raises ModelError where that is not
        known."""
        section = parts(self._config)[name]
        found = self._timed(name, section)
        if not keeps:
            return found
        saved = self._saved(name, section)
        return tuple(replace(unit, saved=own) for unit, own in zip(found, saved, strict=True))

    def _timed(self, name: str, section: PartConfig) -> tuple[Unit, ...]:
        seconds, trained = self._seconds(name, section), self.trained(name)
        parameters, states = self._parameters(name), self._handed(name, section)
        last = len(seconds) - 1
        choices = (
            ("", *fixed_choices(section, last - 1), "") if fixed_choices(section, last - 1) else ("",) * (last + 1)
        )
        ends = {0: ("before", "embedding", "patches"), last: ("after", "head", "merger")}
        found = []
        for at, (one, count) in enumerate(zip(seconds, parameters, strict=True)):
            unit = f"layer {at - 1}" if at not in ends else ends[at][1 if name == DECODER else 2]
            inner, again_s = at not in ends, one.again_s(choices[at]) if choices[at] else 0.0
            backward_s = one.backward.total + again_s
            held = Unit(unit, name, int(inner), one.forward.total, backward_s, count, trains=trained[at])
            found.append(replace(held, output_bytes=states[at], cut="may" if inner and at < last - 1 else "never"))
        return tuple(found)

    def _seconds(self, name: str, section: PartConfig) -> tuple[UnitSeconds, ...]:
        kept = self._counted.keeps_if_quick(name, Cut.of(section))
        rates = self._machine.of(name, section.dtype)
        return unit_seconds(self._counted, name, section, degrees(section), self._loads, rates, kept)

    def trained(self, name: str) -> list[bool]:
        """Of each unit of the tower or the decoder, whether some of it is trained."""
        if name != DECODER:
            return [piece.trained > 0 for piece in self._counted.pieces]
        shares, layers = self._counted.trained, len(self._counted.sizes.layers)
        inside = [True if shares is None else shares.get(at, 0.0) > 0 for at in range(layers)]
        outside = True if shares is None else shares.get(None, 0.0) > 0
        return [outside, *inside, outside]

    def _parameters(self, name: str) -> list[int]:
        if name != DECODER:
            return [piece.size for piece in self._counted.pieces]
        sizes = self._counted.sizes
        return [sizes.embedding, *sizes.layers, sizes.norm + sizes.head]

    def _handed(self, name: str, section: PartConfig) -> list[float]:
        """Bytes that a rank hands on behind each unit of a mean micro-batch."""
        value, own, family = VALUE_BYTES[section.dtype], degrees(section), self._counted.family
        layers = len(family.parts[name].layers.kinds)
        if name == DECODER:
            states = value * hidden_width(family) * self._loads.text.tokens / own.sequence
            return [0.0, *[states] * layers, 0.0]
        pictures = self._loads.pictures
        states = value * tower_width(family) * pictures.patches / own.shards
        return [0.0, *[states] * layers, value * hidden_width(family) * pictures.features / own.shards]

    def _saved(self, name: str, section: PartConfig) -> list[Mapping[str, Saved]]:
        """Of each unit, by choice of recompute; where the configuration says what is recomputed, as it is."""
        rows = (text_rows if name == DECODER else tower_rows)(self._worst, degrees(section))
        layers = len(self._counted.family.parts[name].layers.kinds)
        costs = self._counted.keeps(name, Cut.of(section)).costs(rows, range(layers))
        seconds, chosen = self._seconds(name, section), fixed_choices(section, layers)
        found: list[Mapping[str, Saved]] = []
        for at in range(layers):
            own = costs.layers[str(at)]
            if chosen:
                found.append({NONE: Saved(own[chosen[at]].held_bytes)})
                continue
            again = seconds[at + 1].again_s
            found.append({c: Saved(own[c].held_bytes, own[c].replay_bytes, again(c)) for c in CHOICES})
        return [{NONE: Saved(costs.before_bytes)}, *found, {NONE: Saved(costs.after_bytes)}]


def fixed_choices(section: PartConfig, layers: int) -> tuple[str, ...]:
    """What layers recompute, where the configuration says it; else none."""
    recompute = resolved(section.recompute)
    return () if recompute == "auto" else read_choices(recompute, layers)


@dataclass(frozen=True)
class LayerCuts:
    """cuts: layers at which the runs after the first begin. why: which method they are from, and what is known of
    them, for the user."""

    cuts: tuple[int, ...]
    why: str


def part_cuts(
    config: Config, counted: Counted, trains: bool = True, trials: Trials | None = None
) -> dict[str, LayerCuts]:
    """Of each part that has several runs of layers and no cuts by hand, those that `text.partition` chooses. counted:
    the run's model. trains: anything is trained. trials: None to go by what is counted. Raises ConfigError where none
    can be chosen."""
    asked = [name for name, part in parts(config).items() if _runs(config, name) > 1 and part.cuts is None]
    for name in asked:
        check_runs(name, parts(config)[name], len(counted.family.parts[name].layers.kinds))
    if not asked:
        return {}
    cutting = _Cutting(config, counted, trains, trials)
    joint = cutting.chain() if is_joint(config) and {VISION, DECODER} & {*asked} else {}
    return joint | {name: cutting.part(name) for name in asked if name not in joint}


def first_backwards(config: Config, counted: Counted) -> dict[str, int]:
    """Of each part the first unit through which a backward goes; as many as it has units where none does."""
    units, trained = PartUnits(config, counted), trained_stage(counted.rules, lambda: counted.parameters)
    found = dict.fromkeys(parts(config), 0)
    for name in {VISION, DECODER} & found.keys():
        own = units.trained(name)
        found[name] = own.index(True) if True in own else len(own)
    if any(trained(name, ()) for name in encoders(config)):
        found[DECODER] = 0
    return found


def is_joint(config: Config) -> bool:
    """Whether vision and text are cut together: a chain with cuts by hand in neither, each stage with one run."""
    by_hand = any(parts(config)[name].cuts is not None for name in (VISION, DECODER))
    return config.cluster.chain and not by_hand and decoder(config).virtual_stages == 1


def default_method(config: Config, trains: bool = True) -> str:
    """How layers are cut where text.partition does not say it."""
    if decoder(config).virtual_stages > 1:
        return LAYERS
    return EXACT if trains and config.training.schedule != SEQUENTIAL else PARAMETERS


def _runs(config: Config, name: str) -> int:
    section = parts(config)[name]
    return resolved(section.pipeline) * section.virtual_stages


class _Cutting:
    """The cuts of one run's parts."""

    def __init__(self, config: Config, counted: Counted, trains: bool, trials: Trials | None):
        self._config, self._counted, self._trains, self._trials = config, counted, trains, trials
        self._units = PartUnits(config, counted)
        self._method = decoder(config).partition or default_method(config, trains)
        trained = trained_stage(counted.rules, lambda: counted.parameters)
        self._encoder_trains = trains and any(trained(name, ()) for name in encoders(config))

    def part(self, name: str) -> LayerCuts:
        """Of a part by itself."""
        if name not in (VISION, DECODER):  # whose operations are not known by layer
            kinds = self._counted.family.parts[name].layers.kinds
            even = tuple(Unit(f"layer {at}", name, 1, 1.0, 1.0) for at, _ in enumerate(kinds))
            return LayerCuts(tuple(layer_cuts(even, by_layers(even, _runs(self._config, name)))[name]), LAYERS)
        section, schedule = parts(self._config)[name], self._config.training.schedule
        stages, chunks = resolved(section.pipeline), section.virtual_stages
        kind = ONE_F_ONE_B if name == VISION and schedule == INTERLEAVED else schedule
        units, note, budget = self._weighed((name,))
        programs = lambda: pipeline_programs(kind, stages, chunks, micro_batches(self._config))
        before = name == DECODER and self._encoder_trains
        cuts, why = self._choose(units, stages * chunks, programs, note, budget, before=before)
        return LayerCuts(tuple(layer_cuts(units, cuts)[name]), why)

    def chain(self) -> dict[str, LayerCuts]:
        """Of both parts, as many stages together as they have devices."""
        count = {name: _runs(self._config, name) for name in (VISION, DECODER)}
        units, note, budget = self._weighed((VISION, DECODER))
        tower = sum(unit.part == VISION for unit in units)
        # An audio encoder that trains sends gradients back through all of the decoder too.
        units = tuple(
            replace(unit, trains=unit.trains or self._encoder_trains) if at == tower else unit
            for at, unit in enumerate(units)
        )
        programs = lambda: chain_programs(
            self._config.training.schedule, count[VISION], count[DECODER], micro_batches(self._config)
        )
        held = PinnedUnit(tower - 1, count[VISION] - 1)
        note = f", over vision and text as one chain{note}"
        cuts, why = self._choose(units, sum(count.values()) - 1, programs, note, budget, held)
        found = layer_cuts(units, cuts)
        return {name: LayerCuts(tuple(found[name]), why) for name, stages in count.items() if stages > 1}

    def _weighed(self, names: Sequence[str]) -> tuple[tuple[Unit, ...], str, float]:
        """The units of these parts, a note of where their figures are from, and the bytes that a stage may keep, where
        the search is to choose what is recomputed."""
        units, note, budget = self._counted_units(names)
        if self._trials is None:
            return units, note, budget
        return timed(units, self._trials.times), ", by measured seconds of layers", budget

    def _counted_units(self, names: Sequence[str]) -> tuple[tuple[Unit, ...], str, float]:
        sections, budget = parts(self._config), self._config.memory.budget_gib
        note = self._units.note
        automatic = budget is not None and any(sections[name].recompute == "auto" for name in names)
        if self._method in (EXACT, BMP) and automatic and budget is not None:
            if decoder(self._config).virtual_stages > 1:
                note += ", without its budget: each stage has several runs of layers"
            else:
                try:
                    units = tuple(unit for name in names for unit in self._units.of(name, keeps=True))
                    return units, f"{note}, for {assumed_rows(self._config)} (assumed)", budget * GIB
                except ModelError as error:
                    note += f", without its budget: {error}"
        return tuple(unit for name in names for unit in self._units.of(name)), note, inf

    def _choose(
        self,
        units: tuple[Unit, ...],
        runs: int,
        programs: Callable[[], Programs],
        note: str,
        budget_bytes: float,
        held: PinnedUnit | None = None,
        before: bool = False,
    ) -> tuple[tuple[int, ...], str]:
        """The cuts of units into runs, by position, and what is known of them. before: an encoder trains."""
        method = self._method
        even = PARTITION_METHODS.get(method, by_layers if method == LAYERS else None)
        if even is not None:
            return even(units, runs, held), f"{method}{note}"
        problem = PartitionProblem(units, programs(), self._units.link, budget_bytes, before, held)
        search = exact if method == EXACT else self._near
        try:
            found = search(problem)
        except ConfigError as error:
            if isinf(budget_bytes):
                raise
            # Rows are assumed: whether a run fits, it says itself when it has measured.
            problem = replace(problem, budget_bytes=inf)
            note = f"{note}, which no cut has room for: {error}"
            found = search(problem)
        if method == BMP and self._trials is not None:
            found = self._near(problem, partial(_tried, problem, self._trials))
        return found.cuts, f"{method}{_known(found, problem)}{note}"

    def _near(self, problem: PartitionProblem, score: Score | None = None) -> Partition:
        text = decoder(self._config)
        return bmp(problem, score, radius=text.partition_radius, best=text.partition_candidates)


def _tried(problem: PartitionProblem, trials: Trials, cuts: tuple[int, ...]) -> list[float]:
    """Seconds of some steps under these cuts, by position."""
    steps = trials.run(layer_cuts(problem.units, cuts))
    return [step.seconds if trials.wall else _played(problem, step.times, cuts) for step in steps]


def _played(problem: PartitionProblem, times: PartTimes, cuts: tuple[int, ...]) -> float:
    """Seconds of a step whose units take these times, through the schedule's programs."""
    known = replace(problem, units=timed(problem.units, times), budget_bytes=inf)
    at = np.searchsorted(known.positions.at, cuts)
    return float(steps_of(known, make_tables(known), at[None, :])[0])


def _known(found: Partition, problem: PartitionProblem) -> str:
    gap = "" if not found.bound_s else ", no cut is faster" if found.gap < 1e-9 else f", none is {found.gap:.1%} faster"
    alike = by_parameters(problem.units, problem.runs, problem.held) == found.cuts
    return gap + (", as by parameters" if alike else "")
