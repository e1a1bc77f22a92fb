"""Rules of the optimizer and of what goes with it."""

from __future__ import annotations

from dataclasses import replace

from dhp.config.part import PartConfig
from dhp.config.parts import parts
from dhp.config.ranges import require, require_choice
from dhp.config.rule import Rule, check_rules
from dhp.config.rules import DEEPSPEED, FSDP
from dhp.config.schema import Config
from dhp.core.parameters import ADAMW, MUON, OPTIMIZERS
from dhp.core.state_forms import EXACT_STATES

MATCH_ADAMW, ORIGINAL = ADJUSTMENTS = ("match_rms_adamw", "original")

# Of optimizers other than AdamW, in a part of a run.
_RULES: tuple[Rule, ...] = (
    Rule("training.optimizer {name}.zero_stage {name}.zero_engine",
         lambda p, c: p.zero_stage and p.zero_engine == DEEPSPEED,
         ": DeepSpeed cuts weights into ranges of elements and updates each by itself, but {c.training.optimizer} "
         "needs whole rows and columns. Set {name}.zero_engine=fsdp with {name}.zero_stage=2 or 3 (and "
         "{name}.parallelism=data in the place of deepspeed), {name}.zero_stage=0, or training.optimizer=adamw."),
    Rule("training.optimizer {name}.state_bytes", lambda p, c: p.state_bytes != EXACT_STATES,
         f": forms of states below {EXACT_STATES} bytes are AdamW's. Leave {{name}}.state_bytes out, or set "
         "training.optimizer=adamw."),
    Rule("training.optimizer {name}.host_moments", lambda p, c: p.host_moments,
         ": rows of AdamW's moments come from host memory one after another, but {c.training.optimizer} needs whole "
         "matrices. Set {name}.host_moments=false, or training.optimizer=adamw."),
    Rule("training.optimizer {name}.parallelism", lambda p, c: p.parallelism == "autotp",
         ": DeepSpeed's layers were never tested with it here. Set {name}.parallelism=tensor, or "
         "training.optimizer=adamw."),
)  # fmt: skip


def with_engine(optimizer: str, part: PartConfig) -> PartConfig:
    """The part with zero_engine=fsdp in the place of auto where the optimizer goes with that one alone."""
    asked = optimizer != ADAMW and part.zero_stage >= 2 and part.parallelism != DEEPSPEED
    return replace(part, zero_engine=FSDP) if asked and part.zero_engine == "auto" else part


def check_optimizer(config: Config) -> None:
    """Rules of the optimizer of a resolved configuration. Raises ConfigError."""
    training = config.training
    require_choice("training.optimizer", training.optimizer, OPTIMIZERS, {"adam": ADAMW, "adamw_torch": ADAMW})
    require_choice("training.muon_adjust_lr", training.muon_adjust_lr, ADJUSTMENTS)
    momentum = training.muon_momentum
    require(0 <= momentum < 1, "training.muon_momentum", momentum, "0 <= muon_momentum < 1")
    for key, default in (("muon_momentum", 0.95), ("muon_adjust_lr", MATCH_ADAMW)):
        value, alone = getattr(training, key), training.optimizer == MUON
        require(alone or value == default, f"training.{key}", value, "training.optimizer=muon, which alone reads it")
    if training.optimizer != ADAMW:
        for name, part in parts(config).items():
            check_rules(_RULES, name, part, config)
