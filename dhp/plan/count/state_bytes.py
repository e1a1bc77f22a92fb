"""Bytes of a rank's states, from shape and layout.

What a run keeps (weights, gradients, optimizer), what comes and goes inside a step (the loss's logits, weights that are
gathered), and what the libraries take for themselves. The last is an allowance, not a measurement."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from dhp.config.parts import resolved
from dhp.config.rules import DEEPSPEED, FSDP
from dhp.config.schema import PartConfig
from dhp.core.axes import Degrees
from dhp.core.batch import CHUNK_ROWS
from dhp.core.errors import ConfigError
from dhp.core.graph import StageSpec
from dhp.core.parameters import (
    BFLOAT16,
    COMPENSATION,
    EXACT_STATES,
    FLOAT32,
    FLOAT64,
    FORMAT_BYTES,
    FORMS,
    MASTER,
    MOMENTS,
    SUM,
    WEIGHT,
)
from dhp.models.quantized import BYTES_A_VALUE
from dhp.models.shape import PartShape
from dhp.models.types import HeadShape

VALUE_BYTES = {name: FORMAT_BYTES[name] for name in (BFLOAT16, FLOAT32, FLOAT64)}
BUCKET_ELEMENTS = 1 << 26  # of DeepSpeed's buckets, as `dhp.parallel.optim.zero` asks for them
LIVE_ELEMENTS = 10**9  # that DeepSpeed's stage 3 keeps gathered (stage3_max_live_parameters, its own default)
AHEAD_ELEMENTS = 5 * 10**7  # that it gathers before they are needed (stage3_prefetch_bucket_size, its own default)
CONTEXT_BYTES = 600 << 20  # a CUDA context with torch's kernels loaded; each process has its own
COMMUNICATOR_BYTES = 400 << 20  # NCCL's buffers for one group of ranks


@dataclass(frozen=True)
class RankBytes:
    """Bytes that one rank of a stage keeps between steps; gradients at the end of the backward pass. host: of the
    optimizer in host memory, which are not in the total."""

    weights: int
    gradients: int
    optimizer: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def rank_bytes(part: PartConfig, stage: StageSpec, shape: PartShape) -> RankBytes:
    """Weights, gradients and the optimizer's state of one rank.

    AdamW keeps two averages of each parameter (another optimizer as many as the shape says), and its own copy of the
    weights where it may not update the module's: in 16 bits, where the state has 32 (or the other half of each weight,
    as the form of states is), and under ZeRO, whose ranks update a share and then exchange it. Stage 1 cuts the
    optimizer to the share, stage 2 the gradients too, stage 3 the weights too: torch keeps the share in the optimizer's
    format alone, or in the part's where it is not trained, DeepSpeed has a copy, in float32 as well. AdamW's own
    temporaries are none where it is fused, as on GPUs, and of some numbers at a time for forms other than the default.
    Raises ConfigError for a number format whose memory is not known here."""
    size, pieces = _value_bytes(part), _piece_bytes(part)
    whole, zero = shape.per_rank, part.zero_stage
    spread = spread_evenly(shape, stage.degrees) if zero else shape
    share = -(-spread.per_rank // stage.degrees.shards) if zero else whole
    if not stage.trains:
        return RankBytes(size * (share if zero == 3 and part.zero_engine == FSDP else whole), 0, 0)
    # Weights that are not trained have no gradient and no state.
    trained = 1.0 if spread.trained is None else spread.trained / max(spread.per_rank, 1)
    copy = pieces.get(MASTER, pieces.get(COMPENSATION, size if zero else 0))
    weights = size * (share if zero == 3 else whole) - int((size - BYTES_A_VALUE) * shape.quantized)
    if zero >= 2 and part.zero_engine == FSDP:
        copy = max(size, FORMAT_BYTES[FLOAT32])  # the master weight: with a compensation, both halves at once
        # Gathered, for a layer at a time under stage 3, from shards: the optimizer's copy, and those of frozen weights.
        weights = (0 if zero == 3 else weights) + round(size * share * (1 - trained))
    held = pieces[SUM] * (share if zero >= 2 else whole)
    moments, whole_states = _moment_bytes(pieces, shape)
    optimizer = copy if part.host_moments else copy + moments
    host = int(moments * share * trained) if part.host_moments else 0
    return RankBytes(weights, int(held * trained), int(optimizer * share * trained) + whole_states, host)


def copied_bytes(part: PartConfig, stage: StageSpec, shape: PartShape) -> int:
    """Bytes of host memory in which the rank of a stage that writes most keeps copies of what it saves: the weights,
    whole where no rank has a range of them, and its share of the optimizer's states."""
    whole, zero = shape.per_rank, part.zero_stage
    spread = spread_evenly(shape, stage.degrees) if zero else shape
    share = -(-spread.per_rank // stage.degrees.shards) if zero else whole
    ranges = zero == 3 or (zero > 0 and part.zero_engine == FSDP)
    weights = _value_bytes(part) * (share if ranges else whole)
    if not stage.trains:
        return weights
    pieces = _piece_bytes(part)
    copy = pieces.get(MASTER, pieces.get(COMPENSATION, _value_bytes(part) if zero and part.zero_engine != FSDP else 0))
    trained = 1.0 if spread.trained is None else spread.trained / max(spread.per_rank, 1)
    adapted = trained if shape.trained is not None and part.lora.rank else 1.0  # adapters alone are saved
    moments, whole_states = _moment_bytes(pieces, shape)
    return int(weights * adapted + (copy + moments) * share * trained) + whole_states


def spread_evenly(shape: PartShape, degrees: Degrees) -> PartShape:
    """Numbers of which a rank has as many as of `shape`, if all ranks that split tokens cut all of them. Ranks that
    hold the same experts are fewer, so that a number of these counts several times."""
    more = degrees.shards // degrees.copies - 1
    trained = None if shape.trained is None else shape.trained + more * shape.trained_experts
    return replace(shape, per_rank=shape.per_rank + more * shape.experts, trained=trained)


def _moment_bytes(pieces: Mapping[str, int], shape: PartShape) -> tuple[float, int]:
    """Bytes of the optimizer's averages: of a trained parameter, and of those that each rank has whole."""
    return pieces[MOMENTS[0]] * shape.states, pieces[MOMENTS[0]] * shape.factors


def _value_bytes(part: PartConfig) -> int:
    if part.dtype not in VALUE_BYTES:
        raise ConfigError(f"dtype={part.dtype}: a dry run knows {' and '.join(VALUE_BYTES)} only; choose one")
    return VALUE_BYTES[part.dtype]


def _piece_bytes(part: PartConfig) -> dict[str, int]:
    """Bytes of each piece of a trained parameter, by kind; in wider formats than 16 bits all have the part's."""
    if part.dtype == BFLOAT16:
        return {piece.kind: piece.nbytes for piece in FORMS[part.state_bytes].pieces}
    return dict.fromkeys((WEIGHT, SUM, *MOMENTS), VALUE_BYTES[part.dtype])


def sum_bytes(part: PartConfig) -> int:
    """Of a number in the sum of gradients over micro-batches and ranks."""
    return _piece_bytes(part)[SUM]


def loss_bytes(part: PartConfig, head: HeadShape) -> int:
    """The most that the loss's chunk takes on one tensor rank: logits in the part's format and twice exactly, and the
    gradient of the head, exactly and rounded."""
    size = VALUE_BYTES[part.dtype]
    exact, vocabulary = max(size, FORMAT_BYTES[FLOAT32]), -(-head.vocabulary // resolved(part.tensor))
    logits = CHUNK_ROWS * vocabulary * (2 * size + 2 * exact)
    return logits + vocabulary * head.hidden * (exact + size)


@dataclass(frozen=True)
class Units:
    """Parameters of a stage on a rank, were nothing cut: of a layer, of what is outside of the layers, and of that, of
    what follows them; spread: of the layer, as `spread_evenly` counts them; 0: no experts are shared out."""

    layer: int = 0
    root: int = 0
    behind: int = 0
    spread: int = 0


def stage_units(parameters: Sequence[int], layers: Sequence[int], spread: Sequence[int] = ()) -> Units:
    """Of a stage with these layers. parameters: of each unit of its part; spread: as `Units` has them."""
    last = len(parameters) - 2
    before, behind = parameters[0] * (0 in layers), parameters[-1] * (last - 1 in layers)
    layer = max((at + 1 for at in layers), key=parameters.__getitem__)
    return Units(parameters[layer], before + behind, behind, spread[layer] if spread else 0)


@dataclass(frozen=True)
class Gathered:
    """Bytes of weights and gradients that are whole for a while: in a layer's forward; in the loss; in backward while
    what follows the layers computes, the last layer, and others; while a layer's gradients are summed, when its insides
    are gone; while the last gradients are summed, when all layers are done, if that is another time; idle: all the
    time."""

    forward: float = 0.0
    loss: float = 0.0
    after: float = 0.0
    last: float = 0.0
    backward: float = 0.0
    summing: float = 0.0
    ending: float = 0.0
    idle: float = 0.0

    @property
    def most(self) -> float:
        """At any moment."""
        return max(astuple(self))


def gathered_moments(part: PartConfig, shape: PartShape, units: Units, shards: int, cuda: bool = True) -> Gathered:
    """Bytes that are unsharded for a while where weights or gradients are cut: weights of layers and of what is outside
    of them, gradients, and what is sent of these. shards: ranks that cut states. cuda: sums are NCCL's; gloo's copy
    what they sum."""
    trained = shape.per_rank if shape.trained is None else shape.trained
    if not part.zero_stage or not trained:
        return Gathered()
    if part.zero_engine == FSDP:
        return _by_torch(part, units, shards)
    bucket = float(bucket_bytes(part, trained))
    if part.zero_stage < 3:
        return Gathered(after=bucket, last=bucket, backward=bucket, summing=bucket)
    whole = bucket + _gathered_bytes(part, shape.per_rank)
    # What it gathers ahead comes in one piece, which stays beside the weights that are copied out of it.
    ahead = min(AHEAD_ELEMENTS, shape.per_rank - units.root) * VALUE_BYTES[part.dtype]
    # It copies the bucket for its sum: behind the layers, or amid their backward where they fill more than one.
    size, copies = VALUE_BYTES[part.dtype], bucket * (1 if cuda else 2)
    amid = whole + copies if trained > BUCKET_ELEMENTS else whole
    idle = bucket + shape.small * size
    return Gathered(whole + ahead, whole, amid, amid, amid, amid, idle + copies + units.root * size, idle)


def _by_torch(part: PartConfig, units: Units, shards: int) -> Gathered:
    """FSDP2 gathers a layer beside the one that computes, and keeps what it sent of a layer's gradients, and what came
    of it, until the next one's are sent. What is outside of the layers stays whole, with its gradients until the end.
    Of stage 2 all weights are whole, and counted as such."""
    size, exact, layer = VALUE_BYTES[part.dtype], _piece_bytes(part)[SUM], units.layer
    gathers = part.zero_stage == 3
    ends, weights = (units.root * size, layer * size) if gathers else (0, 0)
    last = ends + 2 * weights + (layer + units.behind) * size
    arrived = (units.spread or layer) * exact / shards
    sent = layer * exact + 2 * arrived
    return Gathered(
        forward=float(ends + 2 * weights),
        loss=float(ends),
        after=float(ends + weights),
        last=float(last),
        backward=last + sent,
        summing=last - weights + sent,
    )


def keeps_gradients(part: PartConfig) -> bool:
    """Their memory is there between steps too: DeepSpeed's stage 3 has them in a buffer of its own."""
    return part.zero_stage == 3 and part.zero_engine != FSDP


def bucket_bytes(part: PartConfig, trained: int) -> int:
    """Of gradients that DeepSpeed sends at once: in the stages 1 and 3 in the format of their sums."""
    return min(BUCKET_ELEMENTS, trained) * (VALUE_BYTES[part.dtype] if part.zero_stage == 2 else sum_bytes(part))


def _gathered_bytes(part: PartConfig, parameters: int) -> int:
    """Of weights that DeepSpeed's stage 3 has gathered: it keeps them while there are no more than so many."""
    return min(LIVE_ELEMENTS, parameters) * VALUE_BYTES[part.dtype]


def runtime_bytes(stage: StageSpec) -> int:
    """The process's context, and a communicator for each group of ranks that talk."""
    own, world = stage.degrees, stage.degrees.world
    groups = own.divided + (1 < own.tensor < world) + (world > 1)
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * min(groups, 3)


def by_zero_stage(part: PartConfig, stage: StageSpec, shape: PartShape) -> dict[int, int | None]:
    """Bytes of states on one rank under each ZeRO stage; None: there is no engine for it in this layout."""
    found: dict[int, int | None] = {}
    for zero in range(4):
        torchs = resolved(part.tensor) > 1 or part.state_bytes != EXACT_STATES or part.host_moments
        torchs = torchs or shape.states != len(MOMENTS) or shape.factors > 0  # DeepSpeed's are AdamW's
        torchs = torchs or stage.degrees.shares_experts
        engine = FSDP if torchs else DEEPSPEED
        alone = not stage.trains or part.lora.quantization is not None
        missing = (zero == 1 and engine == FSDP) or (zero > 0 and alone)
        other = replace(part, zero_stage=zero, zero_engine=engine)
        found[zero] = None if missing else rank_bytes(other, stage, shape).total
    return found
