"""The optimizer's arithmetic: learning rate by step, torch's AdamW, and the coefficient of global-norm clipping."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from dhp.base.errors import ConfigError
from dhp.base.parameters import Group
from dhp.parallel.optimizer.clipped_step import NAME

_FUSED = {"cuda", "cpu"}  # devices that have the kernel
_CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def learning_rate_at(step: int, total_steps: int, base_lr: float, warmup_steps: int, kind: str) -> float:
    """Learning rate of optimizer step number `step` (from 0), equal to transformers' schedule of that kind.

    It rises linearly from 0 over `warmup_steps`, then stays (constant), falls linearly to 0 at `total_steps`
    (linear), or falls along half a cosine (cosine). Raises ConfigError for another kind.
    """
    if kind not in _FACTORS:
        raise ConfigError(f"training.lr_scheduler_type={kind} does not exist; choose one of {', '.join(_FACTORS)}")
    if step < warmup_steps:
        return base_lr * (step / max(1, warmup_steps))
    return base_lr * _FACTORS[kind](step, total_steps, warmup_steps)


def make_adamw(
    named: Iterable[tuple[str, torch.nn.Parameter]], group: Callable[[str], Group], betas: Sequence[float], eps: float
) -> torch.optim.AdamW:
    """torch's AdamW by its fused kernel: one pass, and no temporary copy of a moment. The parameters of each `group`,
    by name, have a group of the optimizer, which keeps its name."""
    members: dict[Group, list[torch.nn.Parameter]] = {}
    for name, parameter in named:
        members.setdefault(group(name), []).append(parameter)
    groups = [
        {NAME: of.name, "params": params, "lr": of.learning_rate, "weight_decay": of.weight_decay}
        for of, params in members.items()
    ]
    there = {parameter.device.type for params in members.values() for parameter in params}
    fused = True if there and there <= _FUSED else None  # None: as torch chooses
    return torch.optim.AdamW(groups, betas=tuple(betas), eps=eps, fused=fused)


def clip_coefficient(norm_sq_parts: Sequence[float], max_norm: float | None) -> tuple[float, float]:
    """The global gradient norm, and what every gradient is multiplied by so that the norm is at most `max_norm`.

    `norm_sq_parts` holds the squared norm of each part's gradients, every parameter counted once. The
    coefficient is min(1, max_norm / (norm + 1e-6)), as in torch; 1 when `max_norm` is None or 0. A norm
    that is not a number makes it not a number, so that broken gradients show.
    """
    norm = math.sqrt(math.fsum(norm_sq_parts))
    if not max_norm:
        return norm, 1.0
    ratio = max_norm / (norm + _CLIP_EPS)
    return norm, ratio if math.isnan(ratio) else min(1.0, ratio)


def _constant(step: int, total_steps: int, warmup_steps: int) -> float:
    return 1.0


def _linear(step: int, total_steps: int, warmup_steps: int) -> float:
    return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))


def _cosine(step: int, total_steps: int, warmup_steps: int) -> float:
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


_FACTORS = {"constant": _constant, "linear": _linear, "cosine": _cosine}
