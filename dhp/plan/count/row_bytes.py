"""Bytes that a part keeps of any micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from dhp.config.layout import OFFLOAD
from dhp.core.reports import RecomputePolicies, StageUsage
from dhp.plan.count.costs import LayerCost, StageCosts

CHOICES = ("none", "light", "mlp", "linear", "all")
NONE, LEAST = CHOICES[0], CHOICES[-1]  # keeps all, keeps least
TRACED = ("none", "light", "mlp", "linear", OFFLOAD, "all")  # offload: never chosen, its copies cost what is not known

Trace = Callable[["TracedRows", RecomputePolicies], "Traced"]


@dataclass(frozen=True)
class RowBytes:
    """Bytes as a function of a rank's rows: a fixed number, and so many of each."""

    fixed: float = 0.0
    tokens: float = 0.0
    features: float = 0.0
    targets: float = 0.0
    patches: float = 0.0

    def of(self, rows: TracedRows) -> float:
        """Bytes of these rows."""
        return (
            self.fixed
            + self.tokens * rows.tokens
            + self.features * rows.features
            + self.targets * rows.targets
            + self.patches * rows.patches
        )

    def __add__(self, other: RowBytes) -> RowBytes:
        return RowBytes(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(RowBytes)))


@dataclass(frozen=True)
class Inside:
    """What a layer, or what is outside of the layers, has live in each pass beyond what is kept: bytes at those moments
    that may be the fullest. As `dhp.plan.count.row_bytes.Traced` counts them."""

    forward: tuple[RowBytes, ...] = ()
    backward: tuple[RowBytes, ...] = ()
    growing: tuple[RowBytes, ...] = ()

    def of(self, rows: TracedRows) -> InsideBytes:
        """The most, of these rows."""
        each = (self.forward, self.backward, self.growing)
        return InsideBytes(*(max((own.of(rows) for own in moments), default=0.0) for moments in each))


@dataclass(frozen=True)
class InsideBytes:
    """Bytes of `Inside`."""

    forward: float = 0.0
    backward: float = 0.0
    growing: float = 0.0

    def back(self, grows: bool) -> float:
        """Of a backward. grows: in which gradients of parameters stay as they come."""
        return self.growing if grows else self.backward


@dataclass(frozen=True)
class StageInsides:
    """Of a stage. layers: in order; before, after: them; None where the stage does not have it."""

    layers: tuple[InsideBytes, ...]
    before: InsideBytes | None
    after: InsideBytes | None


@dataclass(frozen=True)
class PartBytes:
    """What a part keeps on a rank. kinds: of its layers. held, replay: of a layer by its kind and choice of recompute;
    more: of each layer, beyond its kind, as what the first one shares with those behind it; before, after: outside of
    the layers. insides: what comes and goes, of a layer by its kind and choice; ends: before and behind
    the layers."""

    kinds: tuple[str, ...]
    held: Mapping[tuple[str, str], RowBytes]
    replay: Mapping[tuple[str, str], RowBytes]
    more: tuple[RowBytes, ...]
    before: RowBytes
    after: RowBytes
    insides: Mapping[tuple[str, str], Inside] = field(default_factory=dict)
    ends: tuple[Inside, Inside] = (Inside(), Inside())

    def inside(self, rows: TracedRows, layers: Sequence[int], choices: RecomputePolicies) -> StageInsides:
        """What comes and goes in a stage with these layers. choices: of its layers."""
        own = tuple(self.insides[self.kinds[at], choice].of(rows) for at, choice in zip(layers, choices, strict=True))
        before, after = (end.of(rows) for end in self.ends)
        last = len(self.kinds) - 1
        return StageInsides(own, before if 0 in layers else None, after if last in layers else None)

    def held_by(self, layers: Sequence[int], choice: str) -> RowBytes:
        """Of a stage with these layers in all, where each recomputes the same: between forward and backward."""
        found = self.before if 0 in layers else RowBytes()
        for place, at in enumerate(layers):
            found = found + self.held[self.kinds[at], choice] + self.more[at]
            if place == 0 and at > 0:
                found = found + self.more[0]
        return found + self.after if len(self.kinds) - 1 in layers else found

    def costs(self, rows: TracedRows, layers: Sequence[int]) -> StageCosts:
        """Of a stage with these layers, by choice of recompute; seconds are none. rows: of a micro-batch on a rank."""
        found: dict[str, dict[str, LayerCost]] = {}
        for place, at in enumerate(layers):
            beyond = self.more[at].of(rows) + (self.more[0].of(rows) if place == 0 and at > 0 else 0.0)
            found[str(at)] = {
                choice: LayerCost(self.held[kind, choice].of(rows) + beyond, self.replay[kind, choice].of(rows), 0.0)
                for kind, choice in self.held
                if kind == self.kinds[at]
            }
        before = self.before.of(rows) if 0 in layers else 0.0
        after = self.after.of(rows) if len(self.kinds) - 1 in layers else 0.0
        return StageCosts(rows.tokens or rows.patches, tuple(map(str, layers)), before, after, found)


def no_bytes(kinds: Sequence[str]) -> PartBytes:
    """Of a part of which nothing is known. kinds: of its layers."""
    held = {(kind, choice): RowBytes() for kind in kinds for choice in TRACED}
    return PartBytes(tuple(kinds), held, held, (RowBytes(),) * len(kinds), RowBytes(), RowBytes())


def layers_to_trace(alike: Sequence[Hashable], apart: Collection[int] = ()) -> dict[int, int]:
    """Layers that a trace has, and for each other layer the one that stands for it: by layer. alike: equal for layers
    that do the same; apart: those at which something enters the part or leaves it.

    The first and the last layer, those apart and their neighbours stand for themselves alone. Of others that are alike
    as many are traced as there are choices of recompute to be seen in one trace."""
    own = {0, len(alike) - 1} | {at + more for at in apart for more in (-1, 0, 1)}
    found: dict[int, int] = {}
    stands: dict[Hashable, int] = {}
    left: dict[Hashable, int] = dict.fromkeys(alike, len(TRACED) - 1)
    for at, key in enumerate(alike):
        if at not in own and left[key]:
            left[key] -= 1
            stands[key] = at
        found[at] = at if at in own or stands[key] == at else stands[key]
    return found


def of_all_layers(traced: PartBytes, stands: Mapping[int, int]) -> PartBytes:
    """Of the whole part. traced: of some of its layers. stands: see `layers_to_trace`."""
    place = {at: number for number, at in enumerate(dict.fromkeys(sorted(stands.values())))}
    places = [place[stands[at]] for at in sorted(stands)]
    return replace(traced, kinds=tuple(traced.kinds[n] for n in places), more=tuple(traced.more[n] for n in places))


def trace_bytes(kinds: Sequence[str], base: TracedRows, trace: Trace, first_apart: bool = False) -> PartBytes:
    """From traces of `base`, and of it with twice as many of each count that it has. kinds: of the part's layers.
    first_apart: no gradient goes on from the first layer, which therefore keeps less than others; takes more traces.

    Where all is recomputed, every layer and both ends are traced for every count. What a choice of recompute keeps goes
    by the rows that a layer computes with; where features of an inner layer of the tower come to it, by them too."""
    more = {name: replace(base, **{name: 2 * getattr(base, name)}) for name in _counts() if getattr(base, name) > 0}
    points = {"": base, **more}
    uniform = {name: trace(rows, (LEAST,) * len(kinds)) for name, rows in points.items()}
    layers = [_of_layer(uniform, at, base) for at in range(len(kinds))]
    shown = [own.held.features > 0 for own in layers]
    kinds = [f"{kind} with features" if own else kind for kind, own in zip(kinds, shown, strict=True)]
    kinds = [f"{kinds[0]}, the first", *kinds[1:]] if first_apart else kinds
    known = {(kind, LEAST): _least([own for own, of in zip(layers, kinds) if of == kind], base) for kind in kinds}
    beyond = tuple(_less(own.held, known[kind, LEAST].held) for own, kind in zip(layers, kinds, strict=True))
    counts = ["", "patches" if base.patches else "tokens", *(["features"] if any(shown) else [])]
    plans = list(_plans(kinds))
    mixed = [{name: trace(points[name], choices) for name in counts} for choices in plans]
    for key, (number, at) in _places(kinds, plans).items():
        own = _of_layer(mixed[number], at, base)
        known[key] = _LayerBytes(_less(own.held, beyond[at]), own.replay, own.inside)
    for kind in dict.fromkeys(
        kinds
    ):  # what enters a layer is back before its second run, where a replay is measured from
        away = known[kind, OFFLOAD]
        back = _less(known[kind, LEAST].held, away.held)
        known[kind, OFFLOAD] = replace(away, replay=away.replay + back)
    ends = ({name: getattr(one.usage, end) for name, one in uniform.items()} for end in ("before_bytes", "after_bytes"))
    before, after = (_affine(values, base) for values in ends)
    held, replay, insides = ({key: getattr(own, what) for key, own in known.items()} for what in _PIECES)
    outside = (_inside(uniform, -1, base), _inside(uniform, len(kinds), base))
    return PartBytes(tuple(kinds), held, replay, beyond, before, after, insides, outside)


@dataclass(frozen=True)
class _LayerBytes:
    held: RowBytes
    replay: RowBytes
    inside: Inside


_PIECES = ("held", "replay", "inside")


def _of_layer(traces: Mapping[str, Traced], at: int, base: TracedRows) -> _LayerBytes:
    """traces: as `_affine` has values."""
    own = {name: one.usage.layers[at] for name, one in traces.items()}
    held, replay = ({name: getattr(one, f"{what}_bytes") for name, one in own.items()} for what in ("held", "replay"))
    return _LayerBytes(_affine(held, base), _affine(replay, base), _inside(traces, at, base))


def _inside(traces: Mapping[str, Traced], at: int, base: TracedRows) -> Inside:
    """Of a layer, or of what is outside of them."""
    passes: tuple[Pass, ...] = ("forward", "backward", "growing")
    found = ({name: one.moments.get((own, at), ()) for name, one in traces.items()} for own in passes)
    return Inside(*(_moments(each, base) for each in found))


def _moments(found: Mapping[str, Sequence[int]], base: TracedRows) -> tuple[RowBytes, ...]:
    """Operation by operation, those that may be the fullest for some numbers of rows. found: as `_affine` has values;
    where traces have other operations, their fullest moments stand for all."""
    if len({len(values) for values in found.values()}) != 1:
        found = {name: (max(values, default=0),) for name, values in found.items()}
    each = [_affine(dict(zip(found, values)), base) for values in zip(*found.values())]
    best: list[RowBytes] = []
    for own in sorted(set(each), key=lambda one: -one.of(base)):
        if not any(_covers(other, own) for other in best):
            best.append(own)
    return tuple(best)


def _covers(more: RowBytes, less: RowBytes) -> bool:
    return all(getattr(more, one.name) >= getattr(less, one.name) for one in fields(RowBytes))


def _least(layers: Sequence[_LayerBytes], base: TracedRows) -> _LayerBytes:
    return min(layers, key=lambda own: own.held.of(base))


def _affine(values: Mapping[str, float], base: TracedRows) -> RowBytes:
    """values: at `base` under "", and with twice as many of a count under its name."""
    slopes = {name: (value - values[""]) / getattr(base, name) for name, value in values.items() if name}
    return RowBytes(values[""] - sum(slope * getattr(base, name) for name, slope in slopes.items()), **slopes)


def _plans(kinds: Sequence[str]) -> Iterator[RecomputePolicies]:
    """What layers recompute, so that each kind has each choice but the least in some layer, in as few plans as that
    takes."""
    left = {kind: list(TRACED[:-1]) for kind in dict.fromkeys(kinds)}
    while any(left.values()):
        yield tuple(left[kind].pop(0) if left[kind] else LEAST for kind in kinds)


def _places(kinds: Sequence[str], plans: Sequence[RecomputePolicies]) -> dict[tuple[str, str], tuple[int, int]]:
    """Of each kind and choice but the least, a plan and a layer under it."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for number, plan in enumerate(plans):
        for at, (kind, choice) in enumerate(zip(kinds, plan, strict=True)):
            if choice != LEAST:
                found.setdefault((kind, choice), (number, at))
    return found


def _less(more: RowBytes, less: RowBytes) -> RowBytes:
    return RowBytes(*(getattr(more, one.name) - getattr(less, one.name) for one in fields(RowBytes)))


def _counts() -> tuple[str, ...]:
    return tuple(one.name for one in fields(RowBytes) if one.name != "fixed")


def written_bytes(kept: PartBytes) -> dict[str, Any]:
    """Values of a file."""
    of_kinds = ("held", "replay", "insides")
    by_choice = {what: [[*key, asdict(own)] for key, own in getattr(kept, what).items()] for what in of_kinds}
    rows = {what: asdict(getattr(kept, what)) for what in ("before", "after")}
    listed = {"more": [asdict(one) for one in kept.more], "ends": [asdict(one) for one in kept.ends]}
    return {"kinds": list(kept.kinds), **listed, **by_choice, **rows}


def read_bytes(values: Mapping[str, Any]) -> PartBytes:
    """What was written."""
    held, replay = (
        {(kind, choice): RowBytes(**own) for kind, choice, own in values[what]} for what in ("held", "replay")
    )
    more = tuple(RowBytes(**own) for own in values["more"])
    insides = {(kind, choice): _read_inside(own) for kind, choice, own in values["insides"]}
    before, after = (_read_inside(own) for own in values["ends"])
    kinds, outside = tuple(values["kinds"]), (RowBytes(**values["before"]), RowBytes(**values["after"]))
    return PartBytes(kinds, held, replay, more, *outside, insides, (before, after))


def _read_inside(values: Mapping[str, Any]) -> Inside:
    return Inside(**{name: tuple(RowBytes(**one) for one in own) for name, own in values.items()})


@dataclass(frozen=True)
class TracedRows:
    """A micro-batch as one rank sees it. tokens: of the row; features: rows of the tower among them; targets: tokens
    with a loss; patches: of the tower's one picture; windows: attention windows of equal size that it has."""

    tokens: int
    features: int = 0
    targets: int = 1
    patches: int = 0
    windows: int = 1


Pass = Literal["forward", "backward", "growing"]


@dataclass(frozen=True)
class Traced:
    """A trace. usage: what is kept. moments: by pass and layer, bytes that are live behind each operation: forward,
    beyond what was kept up to the layer; backward, beyond what the layers up to it, and itself, keep. Gradients of
    parameters count in the operation that makes them, and not in those behind it; growing: the layer's own count in all
    behind it."""

    usage: StageUsage
    moments: Moments


Moments = Mapping[tuple[Pass, int], tuple[int, ...]]
