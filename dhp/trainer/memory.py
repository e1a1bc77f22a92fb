"""Bytes of device memory that a rank takes without activations, from the model's shape and the layout alone.

What a run keeps (weights, gradients, optimizer), what comes and goes inside a step (the loss's logits, weights that are
gathered), and what the libraries take for themselves. The last is an allowance, not a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dhp.config.part import PartConfig
from dhp.config.parts import resolved
from dhp.config.rules import DEEPSPEED, FSDP
from dhp.core.errors import ConfigError
from dhp.core.graph import StageSpec
from dhp.models.quantized import BYTES_A_VALUE
from dhp.models.shape import PartShape
from dhp.models.types import HeadShape
from dhp.parallel.tensor.loss import CHUNK_ROWS

VALUE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
SUM_BYTES = 4  # gradient sums and optimizer state are never in 16 bits
CONTEXT_BYTES = 600 << 20  # a CUDA context with torch's kernels loaded; each process has its own
COMMUNICATOR_BYTES = 400 << 20  # NCCL's buffers for one group of ranks


@dataclass(frozen=True)
class RankBytes:
    """Bytes that one rank of a stage keeps between steps; gradients at the end of the backward pass."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class Footprint:
    """One rank of a stage. loss: the most that the loss's chunk takes; gathered: weights and gradients that are whole
    for a moment; runtime: the context and communicators."""

    states: RankBytes
    loss: int
    gathered: int
    runtime: int

    @property
    def total(self) -> int:
        """All of it, as if the loss's chunk and gathered layers were there at the same moment."""
        return self.states.total + self.loss + self.gathered + self.runtime


def footprint(
    part: PartConfig, stage: StageSpec, shape: PartShape, head: HeadShape | None, cuda: bool = True
) -> Footprint:
    """The footprint of a stage of a resolved part. head: None where the stage has neither embedding nor head. cuda:
    count what a GPU's libraries take."""
    return Footprint(
        states=rank_bytes(part, stage, shape),
        loss=loss_bytes(part, head) if head is not None and head.loss else 0,
        gathered=gathered_bytes(part, shape, len(stage.layers), head),
        runtime=runtime_bytes(stage) if cuda else 0,
    )


def rank_bytes(part: PartConfig, stage: StageSpec, shape: PartShape) -> RankBytes:
    """Weights, gradients and AdamW's state of one rank.

    AdamW keeps two averages of each parameter, and its own copy of the weights where it may not update the module's: in
    16 bits, where sums and state have 32, and under ZeRO, whose ranks update a share and then exchange it. Stage 1 cuts
    the optimizer to the share, stage 2 the gradients too, stage 3 the weights too, so that they need no copy: torch
    keeps the share in the optimizer's format alone, DeepSpeed in both. AdamW's own temporaries are none where it is
    fused, as on GPUs. Raises ConfigError for a number format whose memory is not known here.
    """
    if part.dtype not in VALUE_BYTES:
        raise ConfigError(f"dtype={part.dtype}: a dry run knows {' and '.join(VALUE_BYTES)} only; choose one")
    size = VALUE_BYTES[part.dtype]
    exact = max(size, SUM_BYTES)
    whole, zero = shape.per_rank, part.zero_stage
    if not stage.trains:
        return RankBytes(size * whole, 0, 0)
    share = -(-whole // stage.degrees.shards) if zero else whole
    copies = int(size < exact or zero in (1, 2))
    weights = size * (share if zero == 3 else whole) - int((size - BYTES_A_VALUE) * shape.quantized)
    if zero == 3 and part.zero_engine == FSDP:
        weights = 0  # gathered for a layer at a time from the optimizer's copy
        copies = 1
    # Weights that are not trained have no gradient and no state.
    trained = 1.0 if shape.trained is None else shape.trained / max(whole, 1)
    held = exact * (share if zero >= 2 else whole)
    return RankBytes(weights, int(held * trained), int(exact * (2 + copies) * share * trained))


def loss_bytes(part: PartConfig, head: HeadShape) -> int:
    """The most that the loss's chunk takes on one tensor rank: logits in the part's format and twice exactly, and the
    gradient of the head, exactly and rounded."""
    size = VALUE_BYTES[part.dtype]
    exact, vocabulary = max(size, SUM_BYTES), -(-head.vocabulary // resolved(part.tensor))
    logits = CHUNK_ROWS * vocabulary * (2 * size + 2 * exact)
    return logits + vocabulary * head.hidden * (exact + size)


def gathered_bytes(part: PartConfig, shape: PartShape, layers: int, head: HeadShape | None) -> int:
    """Bytes that are unsharded for a while where weights or gradients are cut: two layers' weights (one computes, one
    comes), the embedding and the head, a layer's gradients, and what is sent of them."""
    if part.zero_stage < 2:
        return 0
    size = VALUE_BYTES[part.dtype]
    layer = -(-shape.per_rank // layers)
    ends = 0 if head is None else head.matrices * -(-head.vocabulary // resolved(part.tensor)) * head.hidden
    weights = (2 * layer + ends) * size if part.zero_stage == 3 else 0
    return weights + layer * size + layer * max(size, SUM_BYTES)


def runtime_bytes(stage: StageSpec) -> int:
    """The process's context, and a communicator for each group of ranks that talk."""
    own, world = stage.degrees, stage.degrees.world
    groups = own.divided + (1 < own.tensor < world) + (world > 1)
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * min(groups, 3)


def by_zero_stage(part: PartConfig, stage: StageSpec, shape: PartShape) -> dict[int, int | None]:
    """Bytes of states on one rank under each ZeRO stage; None: there is no engine for it in this layout."""
    found: dict[int, int | None] = {}
    for zero in range(4):
        engine = FSDP if resolved(part.tensor) > 1 else DEEPSPEED
        alone = not stage.trains or stage.degrees.shares_experts or part.lora.quantization is not None
        missing = (zero == 1 and engine == FSDP) or (zero > 0 and alone)
        other = replace(part, zero_stage=zero, zero_engine=engine)
        found[zero] = None if missing else rank_bytes(other, stage, shape).total
    return found
