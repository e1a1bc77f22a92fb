"""A tower as units that can be cut into stages: what each costs on one rank, as `dhp.trainer.units` has a decoder's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dhp.config.part import PartConfig
from dhp.config.parts import parts, resolved
from dhp.config.schema import Config
from dhp.core.parameters import TrainingRules, is_inside
from dhp.models.family import VISION, Family
from dhp.models.flops import OPERATIONS
from dhp.models.types import Chunk
from dhp.planner.units import NONE, Unit
from dhp.trainer.memory import VALUE_BYTES
from dhp.trainer.traces import picture_patches, traced_rows
from dhp.trainer.units import SPEED, fixed_choices, hidden_width, replays

if TYPE_CHECKING:
    from dhp.models.shape import Parameter

_WINDOW = "window"  # the kind of a tower's layers that attend to windows, where it has others


@dataclass(frozen=True)
class _Piece:
    """Parameters of a unit. trained: of them; inner: of them, in an MLP's matrices before its activation function."""

    size: int = 0
    trained: int = 0
    inner: int = 0

    def __add__(self, other: _Piece) -> _Piece:
        return _Piece(self.size + other.size, self.trained + other.trained, self.inner + other.inner)

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
    section, pieces = parts(config)[VISION], _pieces(family, parameters, rules)
    rows = traced_rows(config, family, VISION)
    first, *layers, last = (done / resolved(section.tensor) / SPEED for done in _operations(config, family, pieces))
    value, width = VALUE_BYTES[section.dtype], _width(family)
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
    return [replays(piece.inner / piece.size) for piece in _pieces(family, parameters, rules)[1:-1]]


def _layers(section: PartConfig, family: Family, seconds: Sequence[float], pieces: Sequence[_Piece]) -> list[Unit]:
    fixed = fixed_choices(section, len(seconds)) or (NONE,) * len(seconds)
    found = []
    for at, (forward_s, piece, choice) in enumerate(zip(seconds, pieces, fixed, strict=True)):
        again = replays(piece.inner / piece.size)[choice]
        backward_s = forward_s * (1 + piece.share + again)
        found.append(Unit(f"layer {at}", VISION, 1, forward_s, backward_s, piece.size, trains=piece.trained > 0))
    return found


def _pieces(family: Family, parameters: Iterable[Parameter], rules: TrainingRules) -> list[_Piece]:
    """Of each unit. What is outside of the layers belongs to the first stage that has it, were each layer a stage."""
    part = family.tower
    count, path = len(part.layers.kinds), f"{part.layers.path}."
    absent = [part.absent((Chunk(range(at, at + 1), at == 0, at == count - 1),)) for at in range(count)]
    found = [_Piece()] * (count + 2)
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
        found[at] += _Piece(one.size, trained, one.size * inner)
    return found


def _operations(config: Config, family: Family, pieces: Sequence[_Piece]) -> list[float]:
    """Of a forward of one micro-batch of each unit, on the ranks that share one rank's rows."""
    part, rows = family.tower, traced_rows(config, family, VISION)
    work, layers = part.work, pieces[1:-1]
    patches = picture_patches(config, family)
    pictures = rows.patches / patches if patches else 0.0  # a share of them, of one rank of a sequence
    squares = pictures * patches * patches
    windows = [kind == _WINDOW for kind in part.layers.kinds]
    windows = windows if any(windows) and work.window_pair else [True] * len(layers)
    frames = [not window for window in windows] if not all(windows) else windows
    token, size = work.token * (rows.patches + pictures * work.extra_tokens), sum(piece.size for piece in layers)
    handed = [work.embedding * rows.features / len(part.leaves) for _ in part.leaves]
    done = [
        token * piece.size / size
        + squares * work.window_pair / rows.windows * window / sum(windows)
        + squares * work.segment_pair * frame / sum(frames)
        + sum(own for own, layer in zip(handed, part.leaves.values()) if layer == at < len(layers) - 1)
        for at, (piece, window, frame) in enumerate(zip(layers, windows, frames, strict=True))
    ]
    last = sum(own for own, layer in zip(handed, part.leaves.values()) if layer == len(layers) - 1)
    return [OPERATIONS * own for own in (work.patch * rows.patches, *done, last)]


def _width(family: Family) -> float:
    """Of a tower's states: the two products of attention take as many multiply-adds each, of each layer."""
    work = family.tower.work
    return (work.window_pair + work.segment_pair) / 2 / len(family.tower.layers.kinds)
