"""The search for the best layout: parts apart, joined by micro-batch count, memory and schedule; the best in full.

Seconds of a decoder's layout do not depend on the tower's, nor the other way round: they meet in memory, where they
share devices, and in the schedule. So each side is scored by itself, for each way to divide a step into rows, and of
the pairs those are kept that are fastest and fit. A forecast is made of as many as are shown, and some more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from dhp.config.layout import DEGREES, PLAINEST
from dhp.config.parts import DECODER, encoders, parts, resolved, sections
from dhp.config.ranges import ONE_F_ONE_B, SEQUENTIAL, VISION_AHEAD
from dhp.config.schema import Config
from dhp.core.errors import DhpError
from dhp.models.family import VISION, Family
from dhp.planner.planner import as_text
from dhp.planner.units import Numbers
from dhp.trainer.forecast.counted import Counted
from dhp.trainer.forecast.forecast import Forecast, Question, forecast
from dhp.trainer.forecast.layouts import PartLayout, Refused, part_layouts
from dhp.trainer.forecast.loads import RunLoads
from dhp.trainer.forecast.machine import Machine
from dhp.trainer.forecast.samples import Samples
from dhp.trainer.forecast.score import Rows, Score, Scorer
from dhp.trainer.forecast.whole_run import WholeRun
from dhp.trainer.plan import RunPlan, plan_run
from dhp.trainer.row_bytes import CHOICES

FORECASTS = 20  # made of a search's best
EACH = 3  # of these, with the same layout of one part
NEAR = 0.01  # of a step: layouts that differ by less are as fast as each other
_ROWS = (1, 2, 4, 8)  # samples of a row that are tried


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
            return text.seconds
        if not self.apart:
            filled = rows.micro_batches + text.pipeline + vision.pipeline - 2
            return filled * (text.micro_batch_s + vision.micro_batch_s) + text.once_s + vision.once_s
        slower = max(text.micro_batch_s, vision.micro_batch_s)
        fill = text.pipeline * text.micro_batch_s + vision.pipeline * vision.micro_batch_s
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
        further = text.pipeline + self.vision.pipeline - 1 + self.apart
        other = self.vision.bytes(min(count, further))
        return max(own, other) if self.apart else own + other

    @property
    def key(self) -> tuple[object, ...]:
        """Alike for pairs that differ in rows and recompute alone."""
        return self.text.layout, None if self.vision is None else self.vision.layout, self.apart


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


@dataclass(frozen=True)
class Found:
    """The outcome of a search. candidates: those that fit, the best first. tight: the least bytes that any takes, and
    it. refused: layouts that cannot be. scored: pairs of a layout and a choice of recompute that were looked at; fit:
    different layouts among them that fit."""

    candidates: tuple[Candidate, ...]
    tight: Candidate | None
    refused: tuple[Refused, ...]
    scored: int
    fit: int


@dataclass(frozen=True)
class Space:
    """What is searched. config: composed, not resolved. held: keys of each part that stay (`held_keys`); rows_held:
    training.micro_batch_size stays; schedule_held, devices_held: training.schedule, cluster.collocate."""

    config: Config
    whole: WholeRun
    counted: Counted
    machine: Machine
    samples: Samples
    held: Mapping[str, Collection[str]]
    rows_held: bool = False
    schedule_held: bool = False
    devices_held: bool = False
    known: dict[object, RunLoads] = field(default_factory=dict, compare=False)

    def divisions(self) -> Iterator[tuple[int, int, int]]:
        """Samples of a row, replicas and micro-batches of a step's batch."""
        training = self.config.training
        for size in (training.micro_batch_size,) if self.rows_held else _ROWS:
            for replicas in range(1, self.machine.count + 1):
                if training.batch_size % (size * replicas) == 0:
                    yield size, replicas, training.batch_size // (size * replicas)

    def loads(self, layout: PartLayout, rows: Rows) -> RunLoads:
        """Of a division, quickly."""
        packing = self.config.data.packing or (layout.part == DECODER and layout.degrees.sequence > 1)
        key = (rows, packing)
        if key not in self.known:
            text = replace(sections(self.config)[DECODER], **_replicas(rows.replicas))
            training = replace(self.config.training, micro_batch_size=rows.micro_batch_size)
            data = replace(self.config.data, packing=packing)
            config = replace(self.config, text=text, training=training, data=data)
            self.known[key] = self.samples.loads(config, quick=True)
        return self.known[key]


def _replicas(count: int) -> dict[str, Any]:
    return {**dict.fromkeys(DEGREES, 1), "parallelism": "data", "num_actors": count, "data": count}


def search(space: Space, forecasts: int = FORECASTS) -> Found:
    """The best layouts. Raises ConfigError and ModelError where nothing can be said of any."""
    scorer = Scorer(space.counted, space.machine, space.loads)
    pairs: dict[tuple[object, ...], Pair] = {}
    refused: list[Refused] = []
    scored, least, share = 0, None, 0.5
    limit = space.machine.limit_bytes
    for text_devices, vision_devices in _splits(space):
        count = space.machine.count
        apart = vision_devices is not None and text_devices < count
        if apart and not share / 2 <= (count - text_devices) / count <= 2 * share:
            continue
        layouts, more = _layouts(space, text_devices, vision_devices)
        refused += more
        scores = _scores(space, scorer, layouts)
        scored += sum(len(own) for of_part in scores.values() for own in of_part.values())
        for pair in _join(scores, apart, limit):
            if pair.peak_bytes > limit:
                if least is None or pair.peak_bytes < least.peak_bytes:
                    least = pair
            elif pair.key not in pairs or pair.step_s < pairs[pair.key].step_s:
                pairs[pair.key] = pair
        if pairs and not apart:
            share = min(pairs.values(), key=lambda one: one.step_s).vision_share
    chosen = _various(sorted(pairs.values(), key=lambda one: one.step_s), forecasts)
    candidates, more = _forecasts(space, chosen)
    tight = None
    if not candidates and least is not None:
        tight = next(iter(_forecasts(space, [least], False)[0]), None)
    return Found(tuple(ranked(candidates)), tight, tuple(refused + more), scored, len(pairs))


def _splits(space: Space) -> Iterator[tuple[int, int | None]]:
    """Devices of the decoder and of the tower: all for both, or some for each."""
    count = space.machine.count
    if not encoders(space.config):
        yield count, None
        return
    if not space.devices_held or space.config.cluster.collocate:
        yield count, count
    if not space.devices_held or not space.config.cluster.collocate:
        yield from ((count - own, own) for own in range(1, count // 2 + 1) if count % own == 0)


def _layouts(
    space: Space, text_devices: int, vision_devices: int | None
) -> tuple[dict[str, list[PartLayout]], list[Refused]]:
    found, refused = {}, []
    for name, devices in ((DECODER, text_devices), (VISION, vision_devices)):
        if devices is None:
            continue
        section = sections(space.config)[name]
        held, family, node = space.held.get(name, ()), space.whole.family, space.machine.node
        if name == VISION and not space.config.cluster.chain and "pipeline" not in held:
            # Stages of a tower help in a chain, where the decoder's go on behind them.
            held, section = {*held, "pipeline"}, replace(section, pipeline=1)
        layouts, more = part_layouts(name, section, family, devices, held, node, None, space.whole.trained[name])
        found[name] = [one for one in layouts if not _sends_more(one, counted_heads(family, name), held)]
        refused += more if devices == space.machine.count else []
    return found, refused


def counted_heads(family: Family, name: str) -> int:
    """Attention heads of a tower; 1 of a decoder, whose few heads of keys and values a ring may send faster."""
    return family.tower.heads if name == VISION else 1


def _sends_more(layout: PartLayout, heads: int, held: Collection[str]) -> bool:
    """Whether a ring divides what Ulysses could: with as many heads of keys as of queries it sends more."""
    own = layout.degrees
    return own.ring > 1 and "ring" not in held and heads % (own.sequence * own.tensor) == 0


Scores = Mapping[str, Mapping[Rows, Sequence[Score]]]


def _scores(space: Space, scorer: Scorer, layouts: Mapping[str, Sequence[PartLayout]]) -> Scores:
    """By part and division of a step. A tower's go by its micro-batches alone."""
    fixed = {name: sections(space.config)[name].recompute not in (None, "auto") for name in layouts}
    decoders: dict[int, list[PartLayout]] = {}
    for layout in layouts[DECODER]:
        decoders.setdefault(layout.degrees.data, []).append(layout)
    found: dict[str, dict[Rows, list[Score]]] = {name: {} for name in layouts}
    towers: dict[int, list[Score]] = {}
    for size, data, count in space.divisions():
        rows = Rows(size, data, count)
        if data not in decoders:
            continue
        # With fewer micro-batches than stages, most of a pipeline waits.
        full = [one for one in decoders[data] if resolved(one.section.pipeline) <= count]
        own = {DECODER: full} | ({VISION: layouts[VISION]} if VISION in layouts else {})
        for name, of_part in own.items():
            if name != DECODER and count in towers:
                found[name][rows] = towers[count]
                continue
            choices = ("none",) if fixed[name] else CHOICES
            scores = [score for one in of_part for score in scorer.scores(one, rows, choices)]
            found[name][rows] = scores
            if name != DECODER:
                towers[count] = scores
    return found


def _join(scores: Scores, apart: bool, limit: float) -> Iterator[Pair]:
    """Pairs for each division: each layout of one part with the best of the other part that it fits with."""
    for rows, texts in scores[DECODER].items():
        if VISION not in scores:
            yield from (Pair(one, None) for one in texts)
            continue
        visions = scores[VISION].get(rows, [])
        if not texts or not visions:
            continue
        towers, decoders = _front(visions), _front(texts)
        chosen = _fastest(_Columns.of(texts), _Columns.of(towers), rows.micro_batches, apart, limit)
        yield from (Pair(one, towers[at], apart) for one, at in zip(texts, chosen, strict=True))
        others = _fastest(_Columns.of(visions), _Columns.of(decoders), rows.micro_batches, apart, limit)
        yield from (Pair(decoders[at], one, apart) for one, at in zip(visions, others, strict=True))


@dataclass(frozen=True)
class _Columns:
    """Scores of one part, as arrays."""

    micro_batch_s: Numbers
    once_s: Numbers
    stages: Numbers
    kept: Numbers
    held: Numbers
    decodes: bool

    @classmethod
    def of(cls, scores: Sequence[Score]) -> _Columns:
        rows = [
            (one.micro_batch_s, one.once_s, one.pipeline, one.kept_bytes + one.passing_bytes, one.held_bytes)
            for one in scores
        ]
        columns = np.array(rows, dtype=np.float64)
        decodes = scores[0].layout.part == DECODER
        return cls(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3], columns[:, 4], decodes)


def _fastest(one: _Columns, other: _Columns, count: int, apart: bool, limit: float) -> list[int]:
    """Of each of the first, the place of the other with which it is fastest and fits, else with which it is smallest.
    As `Pair` has seconds and bytes."""
    text, vision = (one, other) if one.decodes else (other, one)
    turn, back = (_down, _across) if one.decodes else (_across, _down)
    ahead = turn(np.minimum(count, text.stages))
    further = np.minimum(count, turn(text.stages) + back(vision.stages) - 1 + apart)
    own = turn(text.kept) + ahead * turn(text.held)
    of_tower = back(vision.kept) + further * back(vision.held)
    t, v = turn(text.micro_batch_s), back(vision.micro_batch_s)
    if apart:
        peak = np.maximum(own, of_tower)
        seconds = (count - 1) * np.maximum(t, v) + turn(text.stages) * t + back(vision.stages) * v
        seconds = seconds + np.maximum(turn(text.once_s), back(vision.once_s))
    else:
        peak = own + of_tower
        seconds = (count + turn(text.stages) + back(vision.stages) - 2) * (t + v)
        seconds = seconds + turn(text.once_s) + back(vision.once_s)
    fits = peak <= limit
    best = np.where(fits, seconds, inf).argmin(axis=1)
    least = peak.argmin(axis=1)
    found: list[int] = np.where(fits.any(axis=1), best, least).tolist()
    return found


def _down(values: Numbers) -> Numbers:
    return values[:, None]


def _across(values: Numbers) -> Numbers:
    return values[None, :]


def _front(scores: Sequence[Score]) -> list[Score]:
    """Those that no other beats in seconds and bytes."""
    found: list[Score] = []
    least = inf
    for one in sorted(scores, key=lambda own: (own.seconds, own.bytes(1))):
        if one.bytes(1) < least:
            found.append(one)
            least = one.bytes(1)
    return found


def _various(pairs: Sequence[Pair], most: int) -> list[Pair]:
    """The first ones, at most `EACH` with the same layout of a part."""
    found: list[Pair] = []
    seen: dict[object, int] = {}
    for one in pairs:
        keys = [one.text.layout, *([] if one.vision is None else [one.vision.layout])]
        if any(seen.get(key, 0) >= EACH for key in keys[:1]):
            continue
        for key in keys:
            seen[key] = seen.get(key, 0) + 1
        found.append(one)
        if len(found) == most:
            break
    return found


def _forecasts(space: Space, pairs: Sequence[Pair], fitting: bool = True) -> tuple[list[Candidate], list[Refused]]:
    found, refused = [], []
    for pair in pairs:
        settings = settings_of(space, pair)
        try:
            one = evaluate(space, pair, settings)
        except DhpError as error:
            refused.append(Refused(settings, str(error)))
            continue
        if one.fits or not fitting:
            found.append(one)
    return found, refused


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
    plan = plan_run(config, space.counted.source)
    loads = space.samples.loads(config)
    found = forecast(Question(plan, space.counted, space.machine, loads))
    chosen = {f"{name}.recompute": _part_choices(plan, found, name) for name in parts(config)}
    return Candidate({**settings, **chosen}, plan, found, space.machine.limit_bytes)


def _part_choices(plan: RunPlan, found: Forecast, name: str) -> str:
    """What a part's layers recompute, as its key says it."""
    by_layer = {at: found.recompute[s.name][n] for s in plan.graph.of_part(name) for n, at in enumerate(s.layers)}
    return as_text(tuple(by_layer[at] for at in sorted(by_layer)))


def ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest first. Of those that are as fast, within `NEAR`, that with fewer kinds of parallelism, simpler ones,
    fewer recomputed layers, and more room."""
    left = sorted(candidates, key=lambda one: one.found.step_s)
    found: list[Candidate] = []
    while left:
        near = [one for one in left if one.found.step_s <= left[0].found.step_s * (1 + NEAR)]
        best = min(near, key=_plainness)
        found.append(best)
        left.remove(best)
    return found


def _plainness(one: Candidate) -> tuple[float, ...]:
    sections_of = parts(one.plan.config).values()
    kinds = [[key for key in PLAINEST if resolved(getattr(part, key)) > 1] for part in sections_of]
    places = sum(PLAINEST.index(key) for own in kinds for key in own)
    again = sum(choice != "none" for own in one.found.recompute.values() for choice in own)
    return (sum(map(len, kinds)), places, again, -one.margin_bytes)
