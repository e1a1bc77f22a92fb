"""Layouts of a whole run with their forecasts, and which of them is the better one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from dhp.config.layout import PLAINEST
from dhp.config.parts import DECODER, parts, resolved
from dhp.config.ranges import ONE_F_ONE_B, SEQUENTIAL, VISION_AHEAD
from dhp.core.axes import EVERY_LAYER
from dhp.models.family import VISION
from dhp.planner.planner import as_text
from dhp.trainer.forecast.forecast import Forecast, forecast
from dhp.trainer.forecast.layouts import PartLayout
from dhp.trainer.forecast.pairs import Pair
from dhp.trainer.forecast.question import Question
from dhp.trainer.forecast.space import Space
from dhp.trainer.plan import RunPlan, plan_run

NEAR = 0.01  # of a step: layouts that differ by less are as fast as each other


@dataclass(frozen=True)
class Candidate:
    """A layout of the whole run. settings: keys of the configuration that it sets. plan: of its run; found: what it
    takes."""

    settings: Mapping[str, Any]
    plan: RunPlan
    found: Forecast
    limit_bytes: float

    @property
    def fits(self) -> bool:
        return self.margin_bytes >= 0

    @property
    def margin_bytes(self) -> float:
        return self.limit_bytes - self.found.peak.total


def settings_of(space: Space, pair: Pair) -> dict[str, Any]:
    """Keys of the configuration that a pair sets, by their whole names."""
    found: dict[str, Any] = {}
    for name, score in ((VISION, pair.vision), (DECODER, pair.text)):
        if score is not None:
            plain = {key: value for key, value in score.layout.settings.items()}
            found |= {f"{name}.{key}": value for key, value in plain.items()}
    found["training.micro_batch_size"] = pair.text.rows.micro_batch_size
    if not space.schedule_held:
        stages = max(pair.text.pipeline, 1 if pair.vision is None else pair.vision.pipeline)
        found["training.schedule"] = ONE_F_ONE_B if stages > 1 else VISION_AHEAD if pair.apart else SEQUENTIAL
    if pair.vision is not None:
        found["cluster.collocate"] = not pair.apart
    return found


def evaluate(space: Space, pair: Pair, settings: Mapping[str, Any]) -> Candidate:
    """The forecast of a pair. Raises what the run's checks raise."""
    layouts = {name: score.layout for name, score in ((VISION, pair.vision), (DECODER, pair.text)) if score is not None}
    return evaluate_layouts(space, layouts, settings)


def evaluate_layouts(space: Space, layouts: Mapping[str, PartLayout], settings: Mapping[str, Any]) -> Candidate:
    """The forecast of layouts of the parts. settings: keys of the configuration, as of `settings_of`. Raises what the
    run's checks raise."""
    config = space.whole.composed(layouts)
    cluster = replace(config.cluster, collocate=settings.get("cluster.collocate", config.cluster.collocate))
    training = replace(
        config.training,
        micro_batch_size=settings["training.micro_batch_size"],
        schedule=settings.get("training.schedule", config.training.schedule),
    )
    config = space.whole.resolved(replace(config, cluster=cluster, training=training), layouts)
    plan = plan_run(config, space.counted.source, shapes=space.counted)
    loads = space.samples.loads(config)
    found = forecast(Question(plan, space.counted, space.machine, loads))
    chosen = {f"{name}.recompute": _part_choices(plan, found, name) for name in parts(config)}
    return Candidate({**settings, **chosen}, plan, found, space.machine.limit_bytes)


def _part_choices(plan: RunPlan, found: Forecast, name: str) -> str:
    """What a part's layers recompute, as its key says it."""
    by_layer = {at: found.recompute[s.name][n] for s in plan.graph.of_part(name) for n, at in enumerate(s.layers)}
    return as_text(tuple(by_layer[at] for at in sorted(by_layer)))


def ranked(candidates: Sequence[Candidate], node: int) -> list[Candidate]:
    """The fastest first. Of those that are as fast, within `NEAR`, that whose groups of every layer stay inside a node,
    with fewer kinds of parallelism, simpler ones, fewer recomputed layers, and more room. node: devices of one."""
    left = sorted(candidates, key=lambda one: one.found.step_s)
    found: list[Candidate] = []
    while left:
        near = [one for one in left if one.found.step_s <= left[0].found.step_s * (1 + NEAR)]
        best = min(near, key=lambda one: _plainness(one, node))
        found.append(best)
        left.remove(best)
    return found


def _plainness(one: Candidate, node: int) -> tuple[float, ...]:
    sections_of = parts(one.plan.config).values()
    across = sum(prod(resolved(getattr(part, key)) for key in EVERY_LAYER) > node for part in sections_of)
    kinds = [[key for key in PLAINEST if resolved(getattr(part, key)) > 1] for part in sections_of]
    places = sum(PLAINEST.index(key) for own in kinds for key in own)
    again = sum(choice != "none" for own in one.found.recompute.values() for choice in own)
    return (across, sum(map(len, kinds)), places, again, -one.margin_bytes)
