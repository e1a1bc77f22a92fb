"""Where the parts of a run are cut into stages: each by itself, or the tower and the decoder together as one chain.

In a chain (`cluster.chain`) the tower's last stage and the decoder's first share devices, and the cuts on either side
decide how much of each part these hold. A search sees one stage there, which takes a micro-batch through both actors at
once; in the run the tower's actor is one micro-batch further ahead, which a budget counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from dhp.config.layout import BMP, EXACT, LAYERS
from dhp.config.model_rules import check_runs
from dhp.config.parts import DECODER, decoder, encoders, parts, resolved
from dhp.config.ranges import INTERLEAVED, ONE_F_ONE_B
from dhp.config.resolve import micro_batches
from dhp.config.schema import Config
from dhp.core.errors import ModelError
from dhp.core.parameters import TrainingRules
from dhp.models.family import VISION, Family
from dhp.plan.count.decoder_units import decoder_units, link, replay_shares, saved_of
from dhp.plan.count.tower_units import tower_replays, tower_units
from dhp.plan.count.units import Held, Saved, Unit, layer_cuts
from dhp.plan.cut.bmp import by_layers
from dhp.plan.cut.part_seconds import as_measured
from dhp.plan.cut.partition import (
    GIB,
    LayerCuts,
    budget_note,
    chain_programs,
    choose,
    decoder_cuts,
    default_method,
    pipeline_programs,
    traced_usages,
    trained_shares,
)
from dhp.plan.cut.problem import PartitionProblem
from dhp.plan.model_shapes import Shapes
from dhp.plan.trainable import trained_stage


@dataclass(frozen=True)
class Model:
    """Of a run. family: with the parts of the run. trains: anything is trained."""

    family: Family
    source: str
    rules: TrainingRules
    shapes: Shapes
    trains: bool = True


def part_cuts(config: Config, model: Model) -> dict[str, LayerCuts]:
    """Of each part that has several runs of layers and no cuts by hand, those that `text.partition` chooses. Raises
    ConfigError where it cannot."""
    asked = [name for name, part in parts(config).items() if _runs(config, name) > 1 and part.cuts is None]
    for name in asked:
        check_runs(name, parts(config)[name], len(model.family.parts[name].layers.kinds))
    joint = _chain(config, model) if is_joint(config) and {VISION, DECODER} & {*asked} else {}
    by_part: dict[str, Callable[[Config, Model], LayerCuts]] = {VISION: _tower, DECODER: _decoder}
    alone = (name for name in asked if name not in joint)
    found = {name: by_part[name](config, model) if name in by_part else _even(config, model, name) for name in alone}
    return joint | found


def is_joint(config: Config) -> bool:
    """Whether vision and text are cut together: a chain with cuts by hand in neither, each stage with one run."""
    by_hand = any(parts(config)[name].cuts is not None for name in (VISION, DECODER))
    return config.cluster.chain and not by_hand and decoder(config).virtual_stages == 1


def _runs(config: Config, name: str) -> int:
    section = parts(config)[name]
    return resolved(section.pipeline) * section.virtual_stages


def _decoder(config: Config, model: Model) -> LayerCuts:
    return decoder_cuts(config, model.family, model.source, model.rules, model.shapes, _before(config, model))


def _before(config: Config, model: Model) -> bool | None:
    """Whether an encoder trains; None: nothing is trained."""
    trained = trained_stage(model.rules, model.shapes)
    return any(trained(name, ()) for name in encoders(config)) if model.trains else None


def _tower(config: Config, model: Model) -> LayerCuts:
    """A tower's, by itself: a pipeline with nothing behind it."""
    stages, schedule = _runs(config, VISION), config.training.schedule
    units, note = as_measured(config, model.family, _tower_units(config, model))

    def problem() -> PartitionProblem:
        kind = ONE_F_ONE_B if schedule == INTERLEAVED else schedule
        return PartitionProblem(units, pipeline_programs(kind, stages, 1, micro_batches(config)), link())

    cuts, why = choose(_method(config, model), units, stages, problem, note)
    return LayerCuts(tuple(layer_cuts(units, cuts)[VISION]), why)


def _even(config: Config, model: Model, name: str) -> LayerCuts:
    """Of a part whose operations are not known by layer: like numbers of layers."""
    units = tuple(Unit(f"layer {at}", name, 1, 1.0, 1.0) for at, _ in enumerate(model.family.parts[name].layers.kinds))
    return LayerCuts(tuple(layer_cuts(units, by_layers(units, _runs(config, name)))[name]), LAYERS)


def _chain(config: Config, model: Model) -> dict[str, LayerCuts]:
    """Of both parts, as many stages together as they have devices."""
    count, method = {name: _runs(config, name) for name in (VISION, DECODER)}, _method(config, model)
    tower, behind = _tower_units(config, model), _decoder_units(config, model)
    units, held = (*tower, *behind), Held(len(tower) - 1, count[VISION] - 1)
    saved, note = _saved(config, model, tower, behind) if method in (EXACT, BMP) else ([], "")
    if saved:
        units = tuple(replace(unit, saved=own) for unit, own in zip(units, saved, strict=True))

    def problem() -> PartitionProblem:
        programs = chain_programs(config.training.schedule, count[VISION], count[DECODER], micro_batches(config))
        budget = (config.memory.budget_gib or inf) * GIB if saved else inf
        return PartitionProblem(units, programs, link(), budget, held=held)

    units, measured = as_measured(config, model.family, units)
    note = f", over vision and text as one chain{measured}{note}"
    cuts, why = choose(method, units, sum(count.values()) - 1, problem, note, held)
    found = layer_cuts(units, cuts)
    return {name: LayerCuts(tuple(found[name]), why) for name, stages in count.items() if stages > 1}


def _saved(
    config: Config, model: Model, tower: Sequence[Unit], behind: Sequence[Unit]
) -> tuple[list[dict[str, Saved]], str]:
    """What the units of both parts keep, where something is to be recomputed as a budget needs it; and a note."""
    automatic = {name: parts(config)[name].recompute == "auto" for name in (VISION, DECODER)}
    if config.memory.budget_gib is None or not any(automatic.values()):
        return [], ""
    family, source, rules = model.family, model.source, model.rules
    parameters = model.shapes.parameters
    shares = {
        VISION: tower_replays(family, parameters, rules),
        DECODER: [replay_shares(family, unit.parameters) for unit in behind[1:-1]],
    }
    found: list[dict[str, Saved]] = []
    try:
        for name, units in ((VISION, tower), (DECODER, behind)):
            trained_before = name == DECODER and bool(_before(config, model))
            usages = traced_usages(config, family, source, name, rules, trained_before)
            forward_s = [unit.forward_s for unit in units[1:-1]]
            found += saved_of(forward_s, shares[name], usages, not automatic[name])
    except ModelError as error:
        return [], f", without its budget: {error}"
    return found, budget_note(config)


def _tower_units(config: Config, model: Model) -> tuple[Unit, ...]:
    return tower_units(config, model.family, model.shapes.parameters, model.rules)


def _decoder_units(config: Config, model: Model) -> tuple[Unit, ...]:
    """Behind the tower. An audio encoder that trains sends gradients back through all of them too."""
    trained = trained_shares(model.family, model.shapes, model.rules)
    first, *others = decoder_units(config, model.family, model.shapes.sizes, trained)
    return (replace(first, trains=first.trains or bool(_before(config, model))), *others)


def _method(config: Config, model: Model) -> str:
    return decoder(config).partition or default_method(config, model.trains)
