"""A tower as units that can be cut into stages: what each costs on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dhp.config.parts import parts, resolved
from dhp.config.schema import Config, PartConfig
from dhp.core.parameters import TrainingRules, is_inside
from dhp.models.family import VISION, Family
from dhp.models.flops import OPERATIONS
from dhp.models.types import Chunk
from dhp.plan.count.decoder_units import SPEED, fixed_choices, hidden_width, replays
from dhp.plan.count.state_bytes import VALUE_BYTES
from dhp.plan.count.traces import picture_patches, traced_rows
from dhp.plan.count.units import NONE, Unit

if TYPE_CHECKING:
    from dhp.models.shape import Parameter

WINDOW = "window"  # the kind of a tower's layers that attend to windows, where it has others


@dataclass(frozen=True)
class Piece:
    """Parameters of a unit: the patch embedding, a layer or the merger. trained: of them; inner: of them, in an MLP's
    matrices before its activation function."""

    size: int = 0
    trained: int = 0
    inner: int = 0

    def __add__(self, other: Piece) -> Piece:
        return Piece(self.size + other.size, self.trained + other.trained, self.inner + other.inner)

    @property
    def share(self) -> float:
        """That is trained."""
        return self.trained / self.size if self.size else 0.0


def tower_units(
    config: Config, family: Family, parameters: Iterable[Parameter], rules: TrainingRules
) -> tuple[Unit, ...]:
    """The patch embedding, each layer of the tower, and what merges its states for the decoder; the outer two stay with
    their neighbours, and a merger of an inner layer's states with that layer. parameters: all of the model's. Nothing
    is cut behind the last: in a chain the decoder goes on there."""
    section, pieces = parts(config)[VISION], tower_pieces(family, parameters, rules)
    rows = traced_rows(config, family, VISION)
    first, *layers, last = (done / resolved(section.tensor) / SPEED for done in _operations(config, family, pieces))
    value, width = VALUE_BYTES[section.dtype], tower_width(family)
    units = [
        replace(unit, output_bytes=value * width * rows.patches)
        for unit in _layers(section, family, layers, pieces[1:-1])
    ]
    units[-1] = replace(units[-1], cut="never")
    ends = [
        Unit(name, VISION, 0, forward_s, backward_s, piece.size, trains=piece.trained > 0, cut="never")
        for name, forward_s, backward_s, piece in (
            ("patches", first, first * pieces[0].share, pieces[0]),  # pixels have no gradient
            ("merger", last, last * (1 + pieces[-1].share), pieces[-1]),
        )
    ]
    return (ends[0], *units, replace(ends[1], output_bytes=value * hidden_width(family) * rows.features))


def tower_replays(family: Family, parameters: Iterable[Parameter], rules: TrainingRules) -> list[dict[str, float]]:
    """Of each layer, by choice of recompute, the share of its forward that backward runs again."""
    return [replays(piece.inner / piece.size) for piece in tower_pieces(family, parameters, rules)[1:-1]]


def _layers(section: PartConfig, family: Family, seconds: Sequence[float], pieces: Sequence[Piece]) -> list[Unit]:
    fixed = fixed_choices(section, len(seconds)) or (NONE,) * len(seconds)
    found = []
    for at, (forward_s, piece, choice) in enumerate(zip(seconds, pieces, fixed, strict=True)):
        again = replays(piece.inner / piece.size)[choice]
        backward_s = forward_s * (1 + piece.share + again)
        found.append(Unit(f"layer {at}", VISION, 1, forward_s, backward_s, piece.size, trains=piece.trained > 0))
    return found


def tower_pieces(family: Family, parameters: Iterable[Parameter], rules: TrainingRules) -> list[Piece]:
    """Of each unit. What is outside of the layers belongs to the first stage that has it, were each layer a stage."""
    part = family.tower
    count, path = len(part.layers.kinds), f"{part.layers.path}."
    absent = [part.absent((Chunk(range(at, at + 1), at == 0, at == count - 1),)) for at in range(count)]
    found = [Piece()] * (count + 2)
    for one in parameters:
        if one.part != VISION:
            continue
        number, _, inside = one.name.removeprefix(path).partition(".")
        if one.name.startswith(path):
            at, inner = int(number) + 1, is_inside(inside, part.layers.mlp)
        else:
            holders = [at for at, modules in enumerate(absent) if not is_inside(one.name, modules)] or [0]
            merges = is_inside(one.name, part.projector)
            leads_out = count - 1 in holders and (merges or 0 not in holders)
            at, inner = (count + 1 if leads_out else holders[0] + (merges or holders[0] > 0)), False
        trained = one.size * (one.used and rules.trains(one.name))
        found[at] += Piece(one.size, trained, one.size * inner)
    return found


def _operations(config: Config, family: Family, pieces: Sequence[Piece]) -> list[float]:
    """Of a forward of one micro-batch of each unit, on the ranks that share one rank's rows."""
    rows, patches = traced_rows(config, family, VISION), picture_patches(config, family)
    pictures = rows.patches / patches if patches else 0.0  # a share of them, of one rank of a sequence
    squares = pictures * patches * patches
    load = TowerLoad(rows.patches, squares / rows.windows, squares, rows.features, pictures)
    return [sum(of_unit) for of_unit in tower_operations(family, pieces, load)]


@dataclass(frozen=True)
class TowerLoad:
    """What a tower encodes. patches: of all pictures. windows, frames: Σ length² of the patches that see each other in
    windows and in whole segments. features: rows that the decoder gets. segments: frames of videos, and pictures."""

    patches: float
    windows: float
    frames: float
    features: float
    segments: float


def tower_operations(family: Family, pieces: Sequence[Piece], load: TowerLoad) -> list[tuple[float, float]]:
    """Of a forward of each unit, of products of matrices and of attention."""
    part = family.tower
    work, layers = part.work, pieces[1:-1]
    windows = [kind == WINDOW for kind in part.layers.kinds]
    windows = windows if any(windows) and work.window_pair else [True] * len(layers)
    frames = [not window for window in windows] if not all(windows) else windows
    token, size = work.token * (load.patches + load.segments * work.extra_tokens), sum(one.size for one in layers)
    handed = [work.embedding * load.features / len(part.leaves) for _ in part.leaves]
    leaves = list(zip(handed, part.leaves.values(), strict=True))
    merged = [sum(own for own, layer in leaves if layer == at) for at in range(len(layers))]
    done = [
        (
            token * piece.size / size + (merged[at] if at < len(layers) - 1 else 0.0),
            load.windows * work.window_pair * window / sum(windows)
            + load.frames * work.segment_pair * frame / sum(frames),
        )
        for at, (piece, window, frame) in enumerate(zip(layers, windows, frames, strict=True))
    ]
    units = ((work.patch * load.patches, 0.0), *done, (merged[-1], 0.0))
    return [(OPERATIONS * products, OPERATIONS * attention) for products, attention in units]


def tower_width(family: Family) -> int:
    """Of a tower's states: the two products of attention take as many multiply-adds each, of each layer."""
    work = family.tower.work
    return (work.window_pair + work.segment_pair) // 2 // len(family.tower.layers.kinds)
