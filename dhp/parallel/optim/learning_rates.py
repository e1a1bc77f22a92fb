"""Learning rates by step: transformers' schedules, to the bit.

A curve says which share of its peak a learning rate has; each group of parameters has a peak and a warm-up of its own.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dhp.core.errors import ConfigError


@dataclass(frozen=True)
class RateCurve:
    """The learning rate after the warm-up, as a share of its peak, by kind: constant, linear, cosine,
    cosine_with_restarts, warmup_stable_decay.

    total_steps: of the run. lowest: the share at the end; from there warmup_stable_decay's warm-up begins as well.

    cycles: waves of cosine_with_restarts. decay_steps: the last ones, over which warmup_stable_decay falls, by
    decay_type: cosine, linear or 1-sqrt."""

    kind: str
    total_steps: int
    lowest: float = 0.0
    cycles: int = 1
    decay_steps: int = 0
    decay_type: str = "cosine"

    def above(self, share: float) -> float:
        """A share of what lies between the lowest rate and the peak, as a share of the peak."""
        return max(0.0, share * (1 - self.lowest) + self.lowest)


def learning_rate_at(step: int, peak: float, warmup_steps: int, curve: RateCurve) -> float:
    """Learning rate of optimizer step number `step` (from 0), equal to transformers' schedule of that kind.

    It rises linearly over `warmup_steps`, then follows the curve. Raises ConfigError for a kind that does not exist."""
    if curve.kind not in _FACTORS:
        raise ConfigError(f"training.lr_scheduler_type={curve.kind} does not exist; choose one of {', '.join(KINDS)}")
    return peak * _FACTORS[curve.kind](step, warmup_steps, curve)


def _warmup(step: int, warmup_steps: int) -> float:
    return step / max(1, warmup_steps)


def _progress(step: int, warmup_steps: int, curve: RateCurve) -> float:
    return (step - warmup_steps) / max(1, curve.total_steps - warmup_steps)


def _constant(step: int, warmup_steps: int, curve: RateCurve) -> float:
    return _warmup(step, warmup_steps) if step < warmup_steps else 1.0


def _linear(step: int, warmup_steps: int, curve: RateCurve) -> float:
    if step < warmup_steps:
        return _warmup(step, warmup_steps)
    left = (curve.total_steps - step) / max(1, curve.total_steps - warmup_steps)
    return curve.above(max(0.0, left))


def _cosine(step: int, warmup_steps: int, curve: RateCurve) -> float:
    if step < warmup_steps:
        return _warmup(step, warmup_steps)
    return curve.above(0.5 * (1.0 + math.cos(math.pi * _progress(step, warmup_steps, curve))))


def _cosine_with_restarts(step: int, warmup_steps: int, curve: RateCurve) -> float:
    if step < warmup_steps:
        return _warmup(step, warmup_steps)
    progress = _progress(step, warmup_steps, curve)
    if progress >= 1.0:
        return curve.lowest
    return curve.above(0.5 * (1.0 + math.cos(math.pi * ((curve.cycles * progress) % 1.0))))


def _warmup_stable_decay(step: int, warmup_steps: int, curve: RateCurve) -> float:
    """Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations"."""
    if step < warmup_steps:
        return curve.above(_warmup(step, warmup_steps))
    begin = curve.total_steps - curve.decay_steps
    if step < begin:
        return 1.0
    if step < curve.total_steps:
        return curve.above(_DECAYS[curve.decay_type]((step - begin) / max(1, curve.decay_steps)))
    return curve.lowest


_DECAYS: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}

_FACTORS: Mapping[str, Callable[[int, int, RateCurve], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "warmup_stable_decay": _warmup_stable_decay,
}
KINDS = tuple(_FACTORS)
