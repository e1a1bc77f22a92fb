"""Layouts of a whole run with their forecasts, ranked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod
from typing import Any

import numpy as np

from dhp.config.layout import PLAINEST
from dhp.config.parts import DECODER, parts, resolved
from dhp.config.ranges import ONE_F_ONE_B, SEQUENTIAL, VISION_AHEAD
from dhp.core.axes import EVERY_LAYER
from dhp.models.family import VISION
from dhp.plan.cut.units import Numbers
from dhp.plan.forecast.forecast import Forecast, forecast
from dhp.plan.recompute.planner import as_text
from dhp.plan.run_plan import Question, RunPlan, plan_run
from dhp.plan.search.free_keys import PASSES
from dhp.plan.search.layouts import PartLayout
from dhp.plan.search.scorer import Score, Scores
from dhp.plan.search.space import Space

_COLUMNS = ("micro_batch_s", "once_s", "stages", "kept", "passing", "held")


@dataclass(frozen=True)
class Pair:
    """Scores of both parts, as they run together. vision: None where the run has no tower. apart: each part has devices
    of its own."""

    text: Score
    vision: Score | None
    apart: bool = False

    @cached_property
    def step_s(self) -> float:
        rows, text, vision = self.text.rows, self.text, self.vision
        if vision is None:
            return (rows.micro_batches + text.pipeline - 1) * text.micro_batch_s + text.once_s
        if not self.apart:
            filled = rows.micro_batches + text.pipeline + vision.pipeline - 2
            return filled * (text.micro_batch_s + vision.micro_batch_s) + text.once_s + vision.once_s
        slower = max(text.micro_batch_s, vision.micro_batch_s)
        fill = text.pipeline * text.micro_batch_s + vision.pipeline * vision.rows.batch * vision.micro_batch_s
        return (rows.micro_batches - 1) * slower + fill + max(text.once_s, vision.once_s)

    @property
    def vision_share(self) -> float:
        """Of the devices' work."""
        own = 0.0 if self.vision is None else self.vision.micro_batch_s
        return own / (own + self.text.micro_batch_s)

    @cached_property
    def peak_bytes(self) -> float:
        """Of the fullest device."""
        text, count = self.text, self.text.rows.micro_batches
        own = text.bytes(min(count, text.pipeline))
        if self.vision is None:
            return own
        batch = self.vision.rows.batch
        further = -(-text.pipeline // batch) + self.vision.pipeline - 1 + self.apart
        other = self.vision.bytes(min(-(-count // batch), further))
        return max(own, other) if self.apart else own + other


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of one division, as arrays. at, with_vision: places in the scores."""

    text: Scores
    vision: Scores | None
    apart: bool
    at: np.ndarray
    with_vision: np.ndarray
    step_s: Numbers
    peak_bytes: Numbers

    def __len__(self) -> int:
        return len(self.at)

    def pair(self, number: int) -> Pair:
        """One of them."""
        vision = None if self.vision is None else self.vision.score(int(self.with_vision[number]))
        return Pair(self.text.score(int(self.at[number])), vision, self.apart)

    @cached_property
    def keys(self) -> np.ndarray:
        """Alike for pairs that differ in rows and recompute alone: numbers of both layouts. [pairs, 2]"""
        visions = np.zeros_like(self.at) if self.vision is None else self.vision.numbers[self.with_vision]
        return np.stack([self.text.numbers[self.at], visions], axis=1)


def join(texts: Scores, visions: Scores | None, apart: bool, limit: float) -> Pairs:
    """Each layout of one part with the best of the other part that it fits with. Scores are of one division."""
    every = np.arange(len(texts))
    if visions is None:
        ahead = np.minimum(texts.rows.micro_batches, texts.stages)
        seconds = (texts.rows.micro_batches + texts.stages - 1) * texts.micro_batch_s + texts.once_s
        return Pairs(texts, None, apart, every, every, seconds, texts.kept + texts.passing + ahead * texts.held)
    decoders, towers = texts.front, visions.front
    found = [
        _fastest(texts, visions, every, towers, apart, limit, False),
        _fastest(texts, visions, decoders, np.arange(len(visions)), apart, limit, True),
    ]
    at, other, seconds, taken = (np.concatenate(both) for both in zip(*found, strict=True))
    return Pairs(texts, visions, apart, at, other, seconds, taken)


def _fastest(
    texts: Scores, visions: Scores, own: np.ndarray, others: np.ndarray, apart: bool, limit: float, by_tower: bool
) -> tuple[np.ndarray, np.ndarray, Numbers, Numbers]:
    """Of each decoder's place of `own` the tower's of `others` with which it is fastest and fits, else with which it is
    smallest; by_tower: of each tower. With seconds and bytes, as `Pair` has them."""
    seconds, peak = _together(texts, visions, own, others, apart)
    axis = 0 if by_tower else 1
    fits = peak <= limit
    best = np.where(fits, seconds, inf).argmin(axis=axis)
    least = peak.argmin(axis=axis)
    chosen = np.where(fits.any(axis=axis), best, least)
    every = np.arange(len(chosen))
    row, column = (chosen, every) if by_tower else (every, chosen)
    return own[row], others[column], seconds[row, column], peak[row, column]


def _together(
    texts: Scores, visions: Scores, own: np.ndarray, others: np.ndarray, apart: bool
) -> tuple[Numbers, Numbers]:
    """Seconds and bytes of all pairs of these. [decoders, towers]"""
    count, batch = texts.rows.micro_batches, visions.rows.batch
    text = {name: getattr(texts, name)[own][:, None] for name in _COLUMNS}
    vision = {name: getattr(visions, name)[others] for name in _COLUMNS}
    further = np.minimum(-(-count // batch), -(-text["stages"] // batch) + vision["stages"] - 1 + apart)
    of_text = text["kept"] + text["passing"] + np.minimum(count, text["stages"]) * text["held"]
    of_tower = vision["kept"] + vision["passing"] + further * vision["held"]
    t, v = text["micro_batch_s"], vision["micro_batch_s"]
    if apart:
        seconds = (count - 1) * np.maximum(t, v) + text["stages"] * t + vision["stages"] * batch * v
        return seconds + np.maximum(text["once_s"], vision["once_s"]), np.maximum(of_text, of_tower)
    seconds = (count + text["stages"] + vision["stages"] - 2) * (t + v)
    return seconds + text["once_s"] + vision["once_s"], of_text + of_tower


def firsts(pairs: Sequence[Pairs], values: Numbers, chosen: np.ndarray) -> list[tuple[Pairs, int]]:
    """Of each key, the pair with the least value, the least of all first. values, chosen: of all pairs, one group after
    another; whether they are to be looked at."""
    if not len(chosen) or not chosen.any():
        return []
    keys = np.concatenate([one.keys for one in pairs])
    places = np.flatnonzero(chosen)
    order = places[values[places].argsort(kind="stable")]
    _, first = np.unique(keys[order], axis=0, return_index=True)
    ends = np.cumsum([len(one) for one in pairs])
    found = []
    for place in order[np.sort(first)].tolist():
        group = int(np.searchsorted(ends, place, side="right"))
        found.append((pairs[group], place - int(ends[group]) + len(pairs[group])))
    return found


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
    if pair.vision is not None and not space.passes_held:
        found[PASSES] = pair.vision.rows.batch
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
        vision_batch=settings.get(PASSES, config.training.vision_batch),
    )
    config = space.whole.resolved(replace(config, cluster=cluster, training=training), layouts)
    plan = plan_run(config, counted=space.counted)
    loads = space.samples.loads(config)
    found = forecast(Question(plan, space.machine, loads))
    chosen = {f"{name}.recompute": _part_choices(plan, found, name) for name in parts(config)}
    return Candidate({**settings, **chosen}, plan, found, space.machine.limit_bytes)


def _part_choices(plan: RunPlan, found: Forecast, name: str) -> str:
    """What a part's layers recompute, as its key says it."""
    by_layer = {at: found.recompute[s.name][n] for s in plan.graph.of_part(name) for n, at in enumerate(s.layers)}
    return as_text(tuple(by_layer[at] for at in sorted(by_layer)))


def ranked(candidates: Sequence[Candidate], node: int) -> list[Candidate]:
    """The fastest first. Of those that are as fast, within `NEAR`, that whose groups of every layer stay inside a node,
    with fewer kinds of parallelism, a pass of the tower a micro-batch, simpler ones, fewer recomputed layers, and more
    room. node: devices of one."""
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
    passes = sum(one.plan.graph.batch_of(name) > 1 for name in one.plan.graph.parts())
    return (across, sum(map(len, kinds)), passes, places, again, -one.margin_bytes)
