"""Operations of one rank in each unit of a part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dhp.config.parts import DECODER
from dhp.config.schema import PartConfig
from dhp.core.axes import Degrees
from dhp.core.heads import head_range
from dhp.core.parameters import TrainingRules, is_inside
from dhp.models.family import VISION, Family
from dhp.models.flops import OPERATIONS, head_width
from dhp.models.shape import DecoderSizes, Parameter
from dhp.models.types import Chunk
from dhp.plan.count.rank_traffic import DividedAttention, DividedExperts, DividedMatrices, DividedState
from dhp.plan.count.rates import Operations, Transfer
from dhp.plan.count.row_bytes import NONE, PartBytes, TracedRows
from dhp.plan.count.state_bytes import VALUE_BYTES

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


# Bytes that elementwise kernels read and write, for each that a layer keeps where nothing is recomputed: a forward
# writes it and reads what it is made of; a backward reads it, the gradient that comes, and writes another.
FORWARD_TRAFFIC, BACKWARD_TRAFFIC = 2, 4
ATTENTION_BACKWARD = 2.5  # of a forward's operations: the scores are made again, and four products follow
_WHOLE = ("all", "offload")  # choices of recompute that run a layer again from its input
LOGIT_PASSES = 6  # over the logits of a chunk, forward and backward


@dataclass(frozen=True)
class TextLoad:
    """A micro-batch of one replica of a decoder. pairs: Σ length² of its samples, whatever sees what; targets: tokens
    with a loss."""

    tokens: float
    pairs: float
    targets: float


@dataclass(frozen=True)
class Passes:
    """Of one unit and micro-batch. backward: of its own gradients, without recomputing."""

    forward: Operations
    backward: Operations


def decoder_passes(
    section: PartConfig,
    degrees: Degrees,
    family: Family,
    sizes: DecoderSizes,
    load: TextLoad,
    kept: PartBytes,
    trained: Mapping[int | None, float] | None = None,
) -> tuple[Passes, ...]:
    """Of each layer, and behind them of the last norm with the head. trained: see `decoder_units`."""
    ranks, rows = degrees.tensor * degrees.sequence, _rows(load, degrees)
    there, back = (_sends(section, degrees, family, load, backwards) for backwards in (False, True))
    exchanged = [_exchanges(section, degrees, family, load, backwards) for backwards in (False, True)]
    found: list[Passes] = []
    known: dict[tuple[float, float, str, bool], Passes] = {}  # layers that are the same have one object
    for at, done in enumerate(decoder_operations(family, sizes, load.tokens, load.pairs / 2)):
        share = 1.0 if trained is None else trained.get(at, 0.0)
        sparse = family.decoder.experts is not None and family.decoder.experts.sparse[at]
        key = (done[0], share, kept.kinds[at], sparse)
        if key in known:
            found.append(known[key])
            continue
        products, attention = (own / ranks for own in done)
        products *= 1 + (_hot(section, degrees) - 1) * _in_experts(family, sizes.layers[at]) * sparse
        saved = kept.held[kept.kinds[at], NONE].of(rows)
        of_experts = exchanged if sparse else ((), ())
        forward = Operations(products, attention, FORWARD_TRAFFIC * saved, 1.0, (*there, *of_experts[0]))
        behind = (products * (1 + share), attention * ATTENTION_BACKWARD, BACKWARD_TRAFFIC * saved)
        known[key] = Passes(forward, Operations(*behind, 2.0, (*back, *of_experts[1])))
        found.append(known[key])
    return (*found, _head(section, degrees, family, load, 1.0 if trained is None else trained.get(None, 0.0)))


def tower_passes(
    section: PartConfig,
    degrees: Degrees,
    family: Family,
    pieces: Sequence[UnitParameters],
    load: TowerLoad,
    kept: PartBytes,
    divided: float = 0.0,
    operations: Sequence[tuple[float, float]] | None = None,
) -> tuple[Passes, ...]:
    """Of the patch embedding, each layer and the merger. load: of the ranks that share a sequence, all together.
    divided: the share of the patches whose pictures ranks of a sequence divide; operations: `tower_operations` of the
    load, where they are known."""
    ranks = degrees.tensor * degrees.sequence
    rows = TracedRows(0, patches=max(1, round(load.patches / degrees.sequence)))
    matrices = DividedMatrices(degrees.tensor, rows.patches, tower_width(family), VALUE_BYTES[section.dtype])
    done_of = operations or tower_operations(family, pieces, load)
    over = _over_ranks(section, degrees, family, load.patches * divided) if divided else ((), ())
    found, last = [], len(pieces) - 1
    known: dict[tuple[UnitParameters, tuple[float, float], str], Passes] = {}
    for at, (piece, done) in enumerate(zip(pieces, done_of, strict=True)):
        key = (piece, done, kept.kinds[at - 1] if 0 < at < last else "")
        if key in known:
            found.append(known[key])
            continue
        products, attention = (own / ranks for own in done)
        inner = 0 < at < last
        saved = kept.held[kept.kinds[at - 1], NONE].of(rows) if inner else 0.0
        there, back = (matrices.sends(backwards) if inner else () for backwards in (False, True))
        if inner and family.tower.layers.kinds[at - 1] != WINDOW:
            there, back = (*there, *over[0]), (*back, *over[1])
        gradients = (1.0 if at else 0.0) + piece.share  # pixels have none
        behind = (products * gradients, attention * ATTENTION_BACKWARD, BACKWARD_TRAFFIC * saved)
        forward = Operations(products, attention, FORWARD_TRAFFIC * saved, float(inner), there)
        known[key] = Passes(forward, Operations(*behind, 2.0 * inner, back))
        found.append(known[key])
    return tuple(found)


def _over_ranks(
    section: PartConfig, degrees: Degrees, family: Family, patches: float
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """What ranks of a sequence send, there and back, for attention over pictures of so many patches that they divide.
    Windows stay whole."""
    heads = max(1, family.tower.heads // degrees.tensor)
    dim, value = tower_width(family) // family.tower.heads, VALUE_BYTES[section.dtype]
    whole = DividedAttention(round(patches), heads, heads, dim, *degrees.rows, value)
    there, back = (
        tuple(replace(one, stride=one.stride * degrees.tensor) for one in whole.sends(backwards))
        for backwards in (False, True)
    )
    return there, back


def recomputed(forward: Operations, choice: str, share: float) -> Operations:
    """A second forward in backward, as far as a choice of recompute runs it again. Where projections run again, the sum
    behind attention does too; that behind the MLP is no input of backward. Exchanges of attention run again where
    attention does; of experts, where those do: light alone keeps what they make."""
    sums, exchanges = 0.5 * (choice in (*_WHOLE, "linear")), float(choice in _WHOLE)

    def times(one: Transfer) -> float:
        if one.again is not None:
            return one.times * (one.again and choice != "light")
        return one.times * (exchanges if one.operation in ("all-to-all", "send") else sums)

    again = (replace(one, times=times(one)) for one in forward.sent)
    return replace(forward * share, sent=tuple(one for one in again if one.times))


def _head(section: PartConfig, degrees: Degrees, family: Family, load: TextLoad, share: float) -> Passes:
    targets = load.targets / degrees.sequence
    products = OPERATIONS * family.decoder.work.target * targets / degrees.tensor
    width = family.decoder.work.target / hidden_width(family) / degrees.tensor
    logits = LOGIT_PASSES * targets * width * VALUE_BYTES[section.dtype]
    return Passes(Operations(products, 0.0, logits / 2, 1.0), Operations(products * (1 + share), 0.0, logits / 2, 2.0))


def _sends(section: PartConfig, degrees: Degrees, family: Family, load: TextLoad, back: bool) -> tuple[Transfer, ...]:
    """Of a layer, in the mean of all: those that carry state along a row exchange other values than attention."""
    value, text = VALUE_BYTES[section.dtype], family.config.get_text_config()
    own = round(load.tokens / degrees.sequence)
    matrices = DividedMatrices(degrees.tensor, own, hidden_width(family), value, section.sequence_sharded_norms)
    found: Sequence[Transfer] = matrices.sends(back)
    if degrees.sequence > 1:
        shared = head_range(family.decoder.heads, family.decoder.kv_heads, degrees.tensor, 0)
        dim = head_width(text)
        heads = shared.end - shared.first, sum(shared.repeats)
        whole = DividedAttention(round(load.tokens), *heads, dim, *degrees.rows, value)
        share, mixer = family.decoder.mixing
        apart = [
            replace(one, stride=one.stride * degrees.tensor, times=one.times * (1 - share)) for one in whole.sends(back)
        ]
        of_state = DividedState(own, mixer.values, mixer.heads, mixer.state, *degrees.rows, value)
        mixed = [replace(one, stride=one.stride * degrees.tensor, times=share) for one in of_state.sends()]
        found = (*found, *(one for one in (*apart, *mixed) if one.times))
    return tuple(found)


def _exchanges(
    section: PartConfig, degrees: Degrees, family: Family, load: TextLoad, back: bool
) -> tuple[Transfer, ...]:
    """Of a layer with experts, what replicas that share them out send of their rows."""
    experts, value = family.decoder.experts, VALUE_BYTES[section.dtype]
    if experts is None:
        return ()
    rows = round(load.tokens / degrees.sequence * experts.visits * _hot(section, degrees))
    stride = degrees.sequence * degrees.tensor
    return DividedExperts(degrees.expert, experts.count, rows, hidden_width(family), value, stride).sends(back)


def _hot(section: PartConfig, degrees: Degrees) -> float:
    """Of experts' rows, those of the ranks that have most over the mean."""
    return section.expert_load if degrees.expert > 1 else 1.0


def _in_experts(family: Family, parameters: int) -> float:
    """Of the products of a layer of so many parameters, those in the experts that a token visits."""
    experts = family.decoder.experts
    if experts is None:
        return 0.0
    each = 3 * hidden_width(family) * experts.width
    return each * experts.visits / (parameters - each * (experts.count - experts.visits))


def _rows(load: TextLoad, degrees: Degrees) -> TracedRows:
    tokens, targets = (max(1, round(count / degrees.sequence)) for count in (load.tokens, load.targets))
    return TracedRows(tokens, 0, targets)
