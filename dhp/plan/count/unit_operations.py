"""Operations of a part's units: ends, layers, recomputation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dhp.config.parts import DECODER
from dhp.core.parameters import TrainingRules, is_inside
from dhp.models.family import VISION, Family
from dhp.models.flops import OPERATIONS
from dhp.models.shape import DecoderSizes, Parameter
from dhp.models.types import Chunk
from dhp.plan.count.row_bytes import NONE

if TYPE_CHECKING:
    from dhp.models.shape import Parameter

LIGHT = 0.03  # of a forward: what norms, rotary positions and activation functions take


def decoder_operations(family: Family, sizes: DecoderSizes, tokens: float, pairs: float) -> list[tuple[float, float]]:
    """Of a forward through each layer of all ranks together, of products of matrices and of attention. Products go by
    the layers' parameters, of which experts count as far as tokens visit them. pairs: of tokens that see each other."""
    work, weights = family.decoder.work, visited_parameters(family, sizes)
    attention = OPERATIONS * work.pair / len(weights) * pairs
    return [(OPERATIONS * work.token * own / sum(weights) * tokens, attention) for own in weights]


def visited_parameters(family: Family, sizes: DecoderSizes) -> list[float]:
    """Of each layer, those that a token goes through: of experts, the ones that it visits."""
    experts = family.decoder.experts
    if experts is None:
        return list(map(float, sizes.layers))
    idle = 3 * hidden_width(family) * experts.width * (experts.count - experts.visits)
    return [own - idle * sparse for own, sparse in zip(sizes.layers, experts.sparse, strict=True)]


def replay_shares(family: Family, parameters: int) -> dict[str, float]:
    """By choice of recompute, the share of a layer's forward that backward runs again. mlp: two of an MLP's three
    matrices."""
    text = family.config.get_text_config()
    inner = 3 * text.hidden_size * text.intermediate_size
    return replays(2 / 3 * min(1.0, inner / parameters))


def replays(mlp: float) -> dict[str, float]:
    """The same, where this share of a layer's parameters is in an MLP's matrices before its activation function."""
    return {NONE: 0.0, "light": LIGHT, "mlp": LIGHT + 0.9 * mlp, "linear": 0.9, "all": 1.0, "offload": 1.0}


def hidden_width(family: Family) -> int:
    """Of a decoder's states."""
    return int(family.config.get_text_config().hidden_size)


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


WINDOW = "window"  # the kind of a tower's layers that attend to windows, where it has others


@dataclass(frozen=True)
class UnitParameters:
    """Parameters of a unit: the patch embedding, a layer or the merger. trained: of them; inner: of them, in an MLP's
    matrices before its activation function."""

    size: int = 0
    trained: int = 0
    inner: int = 0

    def __add__(self, other: UnitParameters) -> UnitParameters:
        return UnitParameters(self.size + other.size, self.trained + other.trained, self.inner + other.inner)

    @property
    def share(self) -> float:
        """That is trained."""
        return self.trained / self.size if self.size else 0.0


def tower_pieces(family: Family, parameters: Iterable[Parameter], rules: TrainingRules) -> list[UnitParameters]:
    """Of each unit. What is outside of the layers belongs to the first stage that has it, were each layer a stage."""
    part = family.tower
    count, path = len(part.layers.kinds), f"{part.layers.path}."
    absent = [part.absent((Chunk(range(at, at + 1), at == 0, at == count - 1),)) for at in range(count)]
    found = [UnitParameters()] * (count + 2)
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
        found[at] += UnitParameters(one.size, trained, one.size * inner)
    return found


@dataclass(frozen=True)
class TowerLoad:
    """What a tower encodes. patches: of all pictures. windows, frames: Σ length² of the patches that see each other in
    windows and in whole segments. features: rows that the decoder gets. segments: frames of videos, and pictures."""

    patches: float
    windows: float
    frames: float
    features: float
    segments: float


def tower_operations(family: Family, pieces: Sequence[UnitParameters], load: TowerLoad) -> list[tuple[float, float]]:
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
