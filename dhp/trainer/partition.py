"""Where a run's decoder is cut into stages: the method of its configuration, and what can be said of the cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf, isinf

from dhp.config.layout import BMP, EXACT, LAYERS, PARAMETERS
from dhp.config.parts import DECODER, decoder, parts, resolved
from dhp.config.ranges import SEQUENTIAL
from dhp.config.resolve import micro_batches
from dhp.config.schema import Config
from dhp.core.errors import ConfigError, ModelError
from dhp.core.parameters import TrainingRules
from dhp.core.reports import StageUsage
from dhp.models.family import Family
from dhp.models.shape import DecoderSizes, Parameter
from dhp.planner.partition.bmp import bmp
from dhp.planner.partition.even import PARTITION_METHODS, by_layers, by_parameters
from dhp.planner.partition.exact import exact
from dhp.planner.partition.problem import Partition, PartitionProblem
from dhp.planner.units import Held, Saved, Unit
from dhp.trainer.measured import as_measured
from dhp.trainer.model_shapes import Shapes
from dhp.trainer.programs import pipeline_programs
from dhp.trainer.traces import traced
from dhp.trainer.units import assumed_rows, decoder_units, layer_seconds, link, replay_shares, saved_of

GIB = 2**30
_SEARCHED = ("none", "light", "mlp", "linear", "all")  # choices of recompute that the search has


@dataclass(frozen=True)
class LayerCuts:
    """cuts: layers at which the runs after the first begin. why: which method they are from, and what is known of
    them, for the user."""

    cuts: tuple[int, ...]
    why: str


def decoder_cuts(
    config: Config,
    family: Family,
    source: str,
    rules: TrainingRules,
    shapes: Shapes,
    trained_before: bool | None,
) -> LayerCuts:
    """The cuts of a resolved configuration whose decoder has several runs of layers and no cuts by hand.
    trained_before: an encoder trains; None: nothing is trained, and there is no step to be fast. Raises ConfigError
    where none can be chosen."""
    section, sizes = decoder(config), shapes.sizes
    stages, chunks = resolved(section.pipeline), section.virtual_stages
    method = section.partition or default_method(config, trained_before is not None)
    runs, before = stages * chunks, bool(trained_before)
    trained = trained_shares(family, shapes, rules)
    saved, note = _saved(config, family, source, sizes, rules, before, method)
    units, measured = as_measured(config, family, decoder_units(config, family, sizes, trained, saved))
    note = f"{measured}{note}"
    budget = (config.memory.budget_gib or inf) * GIB if saved else inf

    def problem() -> PartitionProblem:
        programs = pipeline_programs(config.training.schedule, stages, chunks, micro_batches(config))
        return PartitionProblem(units, programs, link(), budget, before)

    cuts, why = choose(method, units, runs, problem, note)
    return LayerCuts(_layers(units, cuts), why)


def choose(
    method: str,
    units: tuple[Unit, ...],
    runs: int,
    problem: Callable[[], PartitionProblem],
    note: str = "",
    held: Held | None = None,
) -> tuple[tuple[int, ...], str]:
    """The cuts of units into runs by this method of `text.partition`, by position, and what is known of them. problem:
    the same for a method that searches. note: to be said too. Raises ConfigError where none can be chosen."""
    even = PARTITION_METHODS.get(method, by_layers if method == LAYERS else None)
    if even is not None:
        return even(units, runs, held), f"{method}{note}"
    asked, search = problem(), exact if method == EXACT else bmp
    try:
        found = search(asked)
    except ConfigError as error:
        if isinf(asked.budget_bytes):
            raise
        # Rows are assumed: whether a run fits, it says itself when it has measured.
        asked, note = replace(asked, budget_bytes=inf), f"{note}, which no cut has room for: {error}"
        found = search(asked)
    return found.cuts, f"{method}{_said(found, asked)}{note}"


def default_method(config: Config, trains: bool = True) -> str:
    """How layers are cut where text.partition does not say it."""
    if decoder(config).virtual_stages > 1:
        return LAYERS
    return EXACT if trains and config.training.schedule != SEQUENTIAL else PARAMETERS


def trained_shares(family: Family, shapes: Shapes, rules: TrainingRules) -> dict[int | None, float] | None:
    """Of each of the decoder's layers, and of all outside of them under None, the share of the parameters that are
    trained; None: all are everywhere."""
    return shares_of(family, shapes.parameters, rules) if rules.selects else None


def shares_of(family: Family, parameters: Iterable[Parameter], rules: TrainingRules) -> dict[int | None, float]:
    """The same of all parameters of a model."""
    path = f"{family.decoder.layers.path}."
    of_layer: dict[int | None, list[tuple[int, bool]]] = {}
    for one in parameters:
        if one.part == DECODER:
            number = one.name.removeprefix(path).partition(".")[0] if one.name.startswith(path) else None
            own = of_layer.setdefault(None if number is None else int(number), [])
            own.append((one.size, one.used and rules.trains(one.name)))
    return {
        at: sum(size for size, is_trained in own if is_trained) / sum(size for size, _ in own)
        for at, own in of_layer.items()
    }


def _saved(
    config: Config,
    family: Family,
    source: str,
    sizes: DecoderSizes,
    rules: TrainingRules,
    trained_before: bool,
    method: str,
) -> tuple[list[dict[str, Saved]], str]:
    """What layers keep under each choice of recompute, where the search is to choose; and a note where it is not
    known."""
    section = decoder(config)
    if method not in (EXACT, BMP) or section.recompute != "auto" or config.memory.budget_gib is None:
        return [], ""
    if section.virtual_stages > 1:
        return [], ", without its budget: each stage has several runs of layers"
    try:
        usages = traced_usages(config, family, source, DECODER, rules, trained_before)
    except ModelError as error:
        return [], f", without its budget: {error}"
    shares = [replay_shares(family, size) for size in sizes.layers]
    return saved_of(layer_seconds(config, family, sizes), shares, usages, False), budget_note(config)


def traced_usages(
    config: Config, family: Family, source: str, name: str, rules: TrainingRules, trained_before: bool
) -> list[StageUsage]:
    """What a part keeps: under each choice of recompute that a search has, where its section says auto, else under
    that which it says. Raises ModelError where it is not known."""
    layers = len(family.parts[name].layers.kinds)
    automatic = parts(config)[name].recompute == "auto"
    choices = [(choice,) * layers for choice in _SEARCHED] if automatic else [None]

    def trace() -> list[StageUsage]:
        return [traced(config, family, source, name, rules, trained_before, choice) for choice in choices]

    return _once(_Asked((repr(config), source, name, trained_before), trace))


@dataclass(frozen=True)
class _Asked:
    """key: all that the traces depend on."""

    key: tuple[str, str, str, bool]
    trace: Callable[[], list[StageUsage]] = field(compare=False)


@lru_cache(maxsize=4)
def _once(asked: _Asked) -> list[StageUsage]:
    """A run is planned some times before it starts, and traces of a large model take seconds."""
    return asked.trace()


def budget_note(config: Config) -> str:
    """For what a budget was kept."""
    return f", for {assumed_rows(config)} (assumed)"


def _layers(units: tuple[Unit, ...], cuts: tuple[int, ...]) -> tuple[int, ...]:
    """Cuts by units as cuts by layers."""
    return tuple(sum(unit.layers for unit in units[:cut]) for cut in cuts)


def _said(found: Partition, problem: PartitionProblem) -> str:
    """What is known of the cuts."""
    gap = "" if not found.bound_s else ", no cut is faster" if found.gap < 1e-9 else f", none is {found.gap:.1%} faster"
    return gap + (
        ", as by parameters" if by_parameters(problem.units, problem.runs, problem.held) == found.cuts else ""
    )
