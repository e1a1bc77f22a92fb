"""Settings of one rank: plain values, decided by the run."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dhp.core.batch import KeepSettings
from dhp.core.graph import StageGraph, StageSpec
from dhp.core.parameters import ADAMW, EXACT_STATES, AdapterSettings, TrainingRules
from dhp.core.reports import RecomputePolicies


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer and its schedule, all steps optimizer steps. betas, eps: AdamW's. momentum, adjust_lr: Muon's.
    decay_steps, decay_type, cycles: as `RateCurve` has them (`dhp.parallel.optim.learning_rates`)."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    lr_scheduler_type: str
    warmup_steps: int
    total_steps: int
    max_grad_norm: float | None
    min_lr: float = 0.0
    cycles: int = 1
    decay_steps: int = 0
    decay_type: str = "cosine"
    optimizer: str = ADAMW
    momentum: float = 0.95
    adjust_lr: str = "match_rms_adamw"


@dataclass(frozen=True)
class StageSettings:
    """One stage: which weights, how they are split, how they are updated.

    spec: the stage; graph: it and all others.

    dtype: a torch dtype's name, in which the stage computes. device: cpu | cuda.

    mlp_chunks: of tokens, that each MLP computes one after another.

    recompute: what each of its layers recomputes at first. measure: report what activations take.

    zero_stage: what is sharded over ranks that hold the same slices; zero_engine: deepspeed or fsdp shards it.

    sequence_sharded_norms: of tensor ranks, between whose blocks each holds the states of its own tokens.

    state_bytes: of a trained parameter, which say in what form its states are kept (`dhp.core.parameters`).
    host_moments: the optimizer's moments lie in host memory.

    autotp: DeepSpeed splits the matrices over tensor ranks, not transformers.

    packing: rows of the text part are packed, so that its attention is ours.

    exclusive_sums: no sum over ranks goes on under another stage's computation on the same devices.

    attention_backend: whose kernels compute attention: auto, or flash_attention_2.

    kernels: who computes norms, rotary positions and gates, by kind (`dhp.config.rules.KERNELS`); none: auto.

    compiled: each layer's forward goes through torch.compile.

    deterministic: kernels that give the same bits each time alone.

    rules: what is trained, and how. adapters: of the part's matrices; None: none.

    resume_from: the part's directory in a checkpoint; None: begin with the model's weights. resume_states: with the
    optimizer's states.

    features: where what the stage makes of pictures is kept; None: nowhere.

    objective: the name of what a step minimizes (`dhp.objectives.objective`).

    plugins: modules that register the model's family (`dhp.models.registry`).
    """

    spec: StageSpec
    graph: StageGraph
    model_name: str
    dtype: str
    device: str
    recompute: RecomputePolicies
    measure: bool
    zero_stage: int
    zero_engine: str
    autotp: bool
    packing: bool
    update: OptimizerSettings
    seed: int
    exclusive_sums: bool = False
    attention_backend: str = "auto"
    compiled: bool = False
    rules: TrainingRules = TrainingRules()
    adapters: AdapterSettings | None = None
    resume_from: str | None = None
    features: KeepSettings | None = None
    mlp_chunks: int = 1
    resume_states: bool = True
    deterministic: bool = False
    kernels: Mapping[str, str] = field(default_factory=dict)
    sequence_sharded_norms: bool = False
    state_bytes: int = EXACT_STATES
    host_moments: bool = False
    objective: str = "sft"
    plugins: tuple[str, ...] = ()
