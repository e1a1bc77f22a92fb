"""The search for the best layout: parts apart, joined by micro-batch count, memory and schedule; the best in full.

Seconds of a decoder's layout do not depend on the tower's, nor the other way round: they meet in memory, where they
share devices, and in the schedule. So each side is scored by itself, for each way to divide a step into rows, and of
the pairs those are kept that are fastest and fit. A forecast is made of as many as are shown, and some more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dhp.config.parts import DECODER, encoders, resolved, sections
from dhp.core.errors import DhpError
from dhp.models.family import VISION, Family
from dhp.trainer.forecast.candidates import Candidate, evaluate, ranked, settings_of
from dhp.trainer.forecast.layouts import PartLayout, Refused, part_layouts
from dhp.trainer.forecast.pairs import Pair, Scores, join
from dhp.trainer.forecast.score import Rows, Score, Scorer
from dhp.trainer.forecast.space import Space
from dhp.trainer.row_bytes import CHOICES

FORECASTS = 20  # made of a search's best
EACH = 3  # of these, with the same layout of one part


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


def search(space: Space, forecasts: int = FORECASTS) -> Found:
    """The best layouts. Raises ConfigError and ModelError where nothing can be said of any."""
    scorer = Scorer(space.counted, space.machine, space.loads)
    pairs: dict[tuple[object, ...], Pair] = {}
    refused: list[Refused] = []
    over: dict[tuple[object, ...], Pair] = {}  # what does not seem to fit
    scored, share = 0, 0.5
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
        for pair in join(scores, apart, limit):
            if pair.peak_bytes > limit:
                if pair.key not in over or pair.peak_bytes < over[pair.key].peak_bytes:
                    over[pair.key] = pair
            elif pair.key not in pairs or pair.step_s < pairs[pair.key].step_s:
                pairs[pair.key] = pair
        if pairs and not apart:
            share = min(pairs.values(), key=lambda one: one.step_s).vision_share
    chosen = _various(sorted(pairs.values(), key=lambda one: one.step_s), forecasts)
    candidates, more = _forecasts(space, chosen)
    tight = None
    if not candidates and over:  # quick figures add what is never together: the smallest may fit all the same
        smallest = sorted(over.values(), key=lambda one: one.peak_bytes)[:forecasts]
        known, more_refused = _forecasts(space, smallest, False)
        candidates, more = [one for one in known if one.fits], [*more, *more_refused]
        tight = None if candidates else min(known, key=lambda one: one.found.peak.total, default=None)
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
