"""Settings of one rank: plain values, decided by the run."""

from dataclasses import dataclass

from dhp.config.rules import read_kernels
from dhp.config.schema import Config, PartConfig
from dhp.core.batch import KeepSettings
from dhp.core.graph import StageGraph, StageSpec
from dhp.core.parameters import ADAMW, AdapterSettings, TrainingRules
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
    """One stage of a run, on each of its ranks: which weights, how they are split, how they are updated.

    config: resolved. spec: the stage; graph: it and all others. device: cpu | cuda.

    recompute: what each of its layers recomputes at first. measure: report what activations take.

    rules: what is trained, and how. adapters: of the part's matrices; None: none.

    resume_from: the part's directory in a checkpoint; None: begin with the model's weights. resume_states: with the
    optimizer's states.

    features: where what the stage makes of pictures is kept; None: nowhere."""

    config: Config
    spec: StageSpec
    graph: StageGraph
    device: str
    update: OptimizerSettings
    recompute: RecomputePolicies
    measure: bool = False
    rules: TrainingRules = TrainingRules()
    adapters: AdapterSettings | None = None
    resume_from: str | None = None
    resume_states: bool = True
    features: KeepSettings | None = None

    @property
    def part(self) -> PartConfig:
        """The section of the stage's part."""
        section: PartConfig = getattr(self.config, self.spec.part)
        return section

    @property
    def exclusive_sums(self) -> bool:
        """Whether no sum over ranks goes on under another stage's computation on the same devices."""
        return self.graph.sharing() > 1 and self.device == "cuda"

    @property
    def kernels(self) -> dict[str, str]:
        """Who computes norms, rotary positions and gates, by kind."""
        return read_kernels(self.spec.part, self.part.kernels)
