"""Rules of the keys that say how learning rates change from step to step."""

from __future__ import annotations

import math
from types import MappingProxyType

from dhp.config.suggestions import did_you_mean, nearest
from dhp.config.training import TrainingConfig
from dhp.core.errors import ConfigError

CONSTANT, RESTARTS, STABLE = "constant", "cosine_with_restarts", "warmup_stable_decay"
LR_SCHEDULES = (CONSTANT, "linear", "cosine", RESTARTS, STABLE)
DECAYS = ("cosine", "linear", "1-sqrt")
# By others' names, ours, with what to bear in mind.
_MEANT = MappingProxyType(
    {
        "cosine_with_min_lr": "cosine, with training.min_lr",
        "constant_with_warmup": "constant, with training.warmup_steps",
        "cosine_with_hard_restarts": f"{RESTARTS}, with training.lr_num_cycles",
        "wsd": STABLE,
    }
)
_DEFAULTS = TrainingConfig()
# By key, the schedules that it says something about.
_ABOUT = {
    "min_lr": tuple(kind for kind in LR_SCHEDULES if kind != CONSTANT),
    "lr_num_cycles": (RESTARTS,),
    "lr_decay_steps": (STABLE,),
    "lr_decay_ratio": (STABLE,),
    "lr_decay_type": (STABLE,),
}


def check_learning_rate(training: TrainingConfig) -> None:
    """Raises ConfigError for values out of range, and for a key that the schedule would not read."""
    kind = training.lr_scheduler_type
    if kind not in LR_SCHEDULES:
        hint = did_you_mean([_MEANT.get(kind.lower()) or nearest(kind, LR_SCHEDULES)])
        raise ConfigError(
            f"training.lr_scheduler_type={kind} does not exist; choose from {', '.join(LR_SCHEDULES)}{hint}"
        )
    for key, kinds in _ABOUT.items():
        value = getattr(training, key)
        if kind not in kinds and value != getattr(_DEFAULTS, key):
            raise ConfigError(
                f"training.{key}={value} with training.lr_scheduler_type={kind}, which does not read it. Set "
                f"training.lr_scheduler_type={' or '.join(kinds)}, or leave training.{key} out"
            )
    low, peak = training.min_lr, training.learning_rate
    if not (math.isfinite(low) and 0 <= low <= peak):
        raise ConfigError(
            f"training.min_lr={low} is out of range: 0 <= min_lr <= learning_rate({peak:g}). It is a learning rate, "
            "not a share of one: set it to the share times training.learning_rate"
        )
    _check_waves(training)


def _check_waves(training: TrainingConfig) -> None:
    if training.lr_num_cycles < 1:
        raise ConfigError(f"training.lr_num_cycles={training.lr_num_cycles} is out of range: lr_num_cycles >= 1")
    steps, ratio, by = training.lr_decay_steps, training.lr_decay_ratio, training.lr_decay_type
    if steps is not None and steps < 0:
        raise ConfigError(f"training.lr_decay_steps={steps} is out of range: lr_decay_steps >= 0")
    if not 0 <= ratio <= 1:
        raise ConfigError(f"training.lr_decay_ratio={ratio} is out of range: 0 <= lr_decay_ratio <= 1, of all steps")
    if by not in DECAYS:
        hint = did_you_mean([nearest(by, DECAYS)])
        raise ConfigError(f"training.lr_decay_type={by} does not exist; choose from {', '.join(DECAYS)}{hint}")


def decay_steps(training: TrainingConfig, total_steps: int, warmup_steps: int) -> int:
    """The last steps of a run, over which warmup_stable_decay falls: training.lr_decay_steps, else lr_decay_ratio of
    `total_steps` rounded up; 0 with another schedule.

    Raises ConfigError where warm-up and decay are longer than the run together.
    """
    if training.lr_scheduler_type != STABLE:
        return 0
    given = training.lr_decay_steps
    steps = math.ceil(total_steps * training.lr_decay_ratio) if given is None else given
    warmed = {f"training.groups.{name}.": one.warmup_steps or 0 for name, one in training.groups.items()}
    section, warmup = max({"": warmup_steps, **warmed}.items(), key=lambda item: item[1])
    if warmup + steps > total_steps:
        key = f"lr_decay_ratio={training.lr_decay_ratio:g}" if given is None else f"lr_decay_steps={given}"
        raise ConfigError(
            f"training.{key} leaves no room for the warm-up: {section}warmup_steps({warmup}) + decay_steps({steps}) > "
            f"steps({total_steps}). Lower one of them, or raise training.num_epochs or training.max_steps"
        )
    return steps
