"""Operations of one rank in each unit of a part.

Products and attention are counted as `dhp.models.flops` counts them, elementwise traffic by what a layer keeps
(`dhp.plan.count.row_bytes`), sends by `dhp.plan.count.rank_traffic`. Recomputing is a share of a
forward (`dhp.plan.count.unit_operations`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dhp.config.schema import PartConfig
from dhp.core.axes import Degrees
from dhp.models.family import Family
from dhp.models.flops import OPERATIONS
from dhp.models.shape import DecoderSizes
from dhp.plan.count.rank_traffic import DividedAttention, DividedMatrices
from dhp.plan.count.rates import Operations, Transfer
from dhp.plan.count.row_bytes import NONE, PartBytes, TracedRows
from dhp.plan.count.state_bytes import VALUE_BYTES
from dhp.plan.count.unit_operations import (
    WINDOW,
    TowerLoad,
    UnitParameters,
    decoder_operations,
    hidden_width,
    tower_operations,
    tower_width,
)

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
    found: list[Passes] = []
    known: dict[tuple[float, float, str], Passes] = {}  # layers that are the same have one object
    for at, done in enumerate(decoder_operations(family, sizes, load.tokens, load.pairs / 2)):
        share = 1.0 if trained is None else trained.get(at, 0.0)
        key = (done[0], share, kept.kinds[at])
        if key in known:
            found.append(known[key])
            continue
        products, attention = (own / ranks for own in done)
        saved = kept.held[kept.kinds[at], NONE].of(rows)
        forward = Operations(products, attention, FORWARD_TRAFFIC * saved, 1.0, there)
        behind = (products * (1 + share), attention * ATTENTION_BACKWARD, BACKWARD_TRAFFIC * saved)
        known[key] = Passes(forward, Operations(*behind, 2.0, back))
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
    attention does."""
    sums, exchanges = 0.5 * (choice in (*_WHOLE, "linear")), float(choice in _WHOLE)
    again = (
        replace(one, times=one.times * (exchanges if one.operation in ("all-to-all", "send") else sums))
        for one in forward.sent
    )
    return replace(forward * share, sent=tuple(one for one in again if one.times))


def _head(section: PartConfig, degrees: Degrees, family: Family, load: TextLoad, share: float) -> Passes:
    targets = load.targets / degrees.sequence
    products = OPERATIONS * family.decoder.work.target * targets / degrees.tensor
    width = family.decoder.work.target / hidden_width(family) / degrees.tensor
    logits = LOGIT_PASSES * targets * width * VALUE_BYTES[section.dtype]
    return Passes(Operations(products, 0.0, logits / 2, 1.0), Operations(products * (1 + share), 0.0, logits / 2, 2.0))


def _sends(section: PartConfig, degrees: Degrees, family: Family, load: TextLoad, back: bool) -> tuple[Transfer, ...]:
    value, text = VALUE_BYTES[section.dtype], family.config.get_text_config()
    own = round(load.tokens / degrees.sequence)
    matrices = DividedMatrices(degrees.tensor, own, hidden_width(family), value, section.sequence_sharded_norms)
    found: Sequence[Transfer] = matrices.sends(back)
    if degrees.sequence > 1:
        heads = text.num_attention_heads // degrees.tensor
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        held = max(1, family.decoder.kv_heads // degrees.tensor)
        whole = DividedAttention(round(load.tokens), heads, held, dim, *degrees.rows, value)
        apart = (replace(one, stride=one.stride * degrees.tensor) for one in whole.sends(back))
        found = (*found, *apart)
    return tuple(found)


def _rows(load: TextLoad, degrees: Degrees) -> TracedRows:
    tokens, targets = (max(1, round(count / degrees.sequence)) for count in (load.tokens, load.targets))
    return TracedRows(tokens, 0, targets)
