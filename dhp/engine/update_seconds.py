"""Seconds of the optimizer's update, alone on this device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dhp.core.parameters import Group
from dhp.engine.stopwatch import Spans, Stopwatch
from dhp.parallel.optim.base import clipped_step, exact_dtype, make_adamw

_SIDE, _MATRICES = 2048, 4  # more than caches hold
_RATE = 1e-3


def measure_update(dtype: str, watch: Stopwatch, limit_s: float) -> float:
    """Seconds for each parameter of a step of AdamW with clipped gradients, for a part that computes in `dtype`: with
    master weights where that is a format of 16 bits, which are rounded behind it."""
    computed = getattr(torch, dtype)
    exact = exact_dtype(computed)

    def matrix(value: float, of: torch.dtype) -> Tensor:
        return torch.full((_SIDE, _SIDE), value, dtype=of, device=watch.device)

    masters = [nn.Parameter(matrix(0.5, exact)) for _ in range(_MATRICES)]
    rounded = [matrix(0.5, computed) for _ in masters] if computed != exact else []
    group = Group("part", _RATE, 0.0, 0)
    named = [(str(at), one) for at, one in enumerate(masters)]
    optimizer = make_adamw(named, lambda name: group, (0.9, 0.999), 1e-8)
    for one in masters:
        one.grad = matrix(0.01, exact)

    @torch.no_grad()
    def update() -> None:
        clipped_step(optimizer, [one.grad for one in masters if one.grad is not None], _RATE, 0.5)
        if rounded:
            torch._foreach_copy_(rounded, [one.detach() for one in masters])

    spans = watch.median(lambda: Spans(watch.once(update), 0.0, 0.0), limit_s)
    return spans.forward / (_MATRICES * _SIDE * _SIDE)
