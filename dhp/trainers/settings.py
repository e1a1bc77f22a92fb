"""What a worker is told at birth: plain values, decided by the driver."""

from __future__ import annotations

from dataclasses import dataclass

from dhp.parallel.comm.mesh import Degrees


@dataclass(frozen=True)
class UpdateSettings:
    """AdamW and its schedule; `total_steps` and `warmup_steps` in optimizer steps."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    lr_scheduler_type: str
    warmup_steps: int
    total_steps: int
    max_grad_norm: float | None


@dataclass(frozen=True)
class PartSettings:
    """One part: which weights, how they are split, how they are updated.

    dtype: a torch dtype's name; device: cpu | cuda.
    """

    part: str
    model_name: str
    degrees: Degrees
    dtype: str
    device: str
    recompute: str  # as `dhp.config.recompute` reads it; auto begins with everything
    measure: bool  # report what activations take
    zero_stage: int
    autotp: bool  # DeepSpeed splits the matrices over degrees.tensor ranks, not transformers
    packing: bool  # rows of the text part are packed, so that its attention is ours
    update: UpdateSettings
    seed: int
    zero_engine: str = "deepspeed"  # or fsdp: who cuts the states
    exclusive_sums: bool = False  # no sum over ranks goes on under the other part's computation
    trace: bool = False  # keep the collectives as spans
    resume_from: str | None = None  # this part's directory in a checkpoint; None: begin with the model's weights
