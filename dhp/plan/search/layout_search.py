"""Searches for the best layout: parts apart, then joined.

Seconds of a decoder's layout do not depend on the tower's, nor the other way round: they meet in memory, where they
share devices, and in the schedule. So each side is scored by itself, for each way to divide a step into rows, and of
the pairs those are kept that are fastest and fit. A forecast is made of as many as are shown, and some more."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dhp.config.parts import DECODER, encoders, resolved, sections
from dhp.core.errors import DhpError
from dhp.models.family import VISION, Family
from dhp.plan.count.row_bytes import CHOICES
from dhp.plan.cut.units import Numbers
from dhp.plan.search.candidates import Candidate, Pair, Pairs, evaluate, firsts, join, ranked, settings_of
from dhp.plan.search.layouts import PartLayout, Refused, part_layouts
from dhp.plan.search.scorer import Rows, Scores
from dhp.plan.search.space import Scored, Space

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
    pairs: list[Pairs] = []
    refused: list[Refused] = []
    scored, share = 0, 0.5
    limit, count = space.machine.limit_bytes, space.machine.count
    for text_devices, vision_devices in _splits(space):
        apart = vision_devices is not None and text_devices < count
        if apart and not share / 2 <= (count - text_devices) / count <= 2 * share:
            continue
        own = _scored(space, text_devices, vision_devices)
        refused += own.refused if not apart else []
        scored += own.count
        pairs += [join(texts, visions, apart, limit) for texts, visions in own.scores]
        if not apart:
            share = _vision_share(pairs, limit)
    step_s, peak = (_all(pairs, name) for name in ("step_s", "peak_bytes"))
    fitting = firsts(pairs, step_s, peak <= limit)
    chosen = _various((group.pair(at) for group, at in fitting), forecasts)
    candidates, more = _forecasts(space, chosen)
    tight = None
    if not candidates:  # quick figures add what is never together: the smallest may fit all the same
        smallest = [group.pair(at) for group, at in firsts(pairs, peak, peak > limit)[:forecasts]]
        known, more_refused = _forecasts(space, smallest, False)
        candidates, more = [one for one in known if one.fits], [*more, *more_refused]
        tight = None if candidates else min(known, key=lambda one: one.found.peak.total, default=None)
    return Found(tuple(ranked(candidates, space.machine.node)), tight, tuple(refused + more), scored, len(fitting))


def _all(pairs: Sequence[Pairs], name: str) -> Numbers:
    return np.concatenate([getattr(one, name) for one in pairs]) if pairs else np.zeros(0)


def _vision_share(pairs: Sequence[Pairs], limit: float) -> float:
    """Of the devices' work, in the fastest layout that fits; half where none does."""
    step_s = np.where(_all(pairs, "peak_bytes") <= limit, _all(pairs, "step_s"), np.inf)
    if not len(step_s) or not np.isfinite(step_s).any():
        return 0.5
    place = int(step_s.argmin())
    for own in pairs:
        if place < len(own):
            return own.pair(place).vision_share
        place -= len(own)
    return 0.5


def _scored(space: Space, text_devices: int, vision_devices: int | None) -> Scored:
    """Of layouts on so many devices, once for all questions to the same space."""
    key = (text_devices, vision_devices)
    if key not in space.scored:
        layouts, refused = _layouts(space, text_devices, vision_devices)
        space.scored[key] = _scores(space, layouts, refused)
    return space.scored[key]


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
        refused += more
    return found, refused


def counted_heads(family: Family, name: str) -> int:
    """Attention heads of a tower; 1 of a decoder, whose few heads of keys and values a ring may send faster."""
    return family.tower.heads if name == VISION else 1


def _sends_more(layout: PartLayout, heads: int, held: Collection[str]) -> bool:
    """Whether a ring divides what Ulysses could: with as many heads of keys as of queries it sends more."""
    own = layout.degrees
    return own.ring > 1 and "ring" not in held and heads % (own.sequence * own.tensor) == 0


def _scores(space: Space, layouts: Mapping[str, Sequence[PartLayout]], refused: Sequence[Refused]) -> Scored:
    """For each division of a step. A tower's scores go by its passes alone."""
    fixed = {name: sections(space.config)[name].recompute not in (None, "auto") for name in layouts}
    choices = {name: ("none",) if own else CHOICES for name, own in fixed.items()}
    decoders: dict[int, list[PartLayout]] = {}
    for layout in layouts[DECODER]:
        decoders.setdefault(layout.degrees.data, []).append(layout)
    found: list[tuple[Scores, Scores | None]] = []
    of_decoders: dict[Rows, Scores] = {}
    towers: dict[tuple[int, int], Scores] = {}
    count = 0
    for rows in space.divisions():
        # With fewer micro-batches than stages, most of a pipeline waits.
        full = [one for one in decoders.get(rows.replicas, ()) if resolved(one.section.pipeline) <= rows.micro_batches]
        if not full or (VISION in layouts and not layouts[VISION]):
            continue
        plain = replace(rows, batch=1)
        if plain not in of_decoders:
            of_decoders[plain] = space.scorer.scores(full, plain, choices[DECODER])
        texts = of_decoders[plain]
        passes = (rows.micro_batches, rows.batch)
        if VISION in layouts and passes not in towers:
            towers[passes] = space.scorer.scores(layouts[VISION], rows, choices[VISION])
        visions = towers[passes] if VISION in layouts else None
        found.append((texts, visions))
        count += len(texts) + (0 if visions is None else len(visions))
    return Scored(tuple(found), tuple(refused), count)


def _various(pairs: Iterable[Pair], most: int) -> list[Pair]:
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
