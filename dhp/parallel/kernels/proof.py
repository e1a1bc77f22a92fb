"""Checks that a kernel gives what a module's own code gives, on a few random states before it replaces that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Outputs = Callable[..., Any]  # of tensors: one tensor, or several
_NEAR = {torch.float32: 1e-6, torch.float64: 1e-12}  # relative to the module's own code
_ROUNDED_ONCE = 1.05  # a 16-bit result is right where its error is that of rounding the exact one, or the module's own


class Trial(NamedTuple):
    """What is compared: `own` and `ours`, each a function of `states`, and of `fixed` behind them.

    states: in float32; both functions take them in the part's format, and get gradients. fixed: in the format in which
    they are used. weights: parameters that both use themselves, put into the part's format meanwhile.
    """

    own: Outputs
    ours: Outputs
    states: Sequence[Tensor]
    fixed: Sequence[Tensor] = ()
    weights: Sequence[nn.Parameter] = ()


def is_proved(trial: Trial, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether outputs and gradients of `ours` in `dtype` are those of `own`: within 1e-6 of each one's norm in float32
    and 1e-12 in float64, and in 16 bits with an error against float64 that is not above that of `own`."""
    own, ours = (_run(function, trial, device, dtype) for function in (trial.own, trial.ours))
    if any(a.dtype != b.dtype for a, b in zip(own, ours, strict=True)):
        return False
    if dtype in _NEAR:
        return all(_error(b, a) <= _NEAR[dtype] * float(a.double().norm()) for a, b in zip(own, ours, strict=True))
    exact = _run(trial.own, trial, device, torch.float64)
    return all(
        _error(b, e) <= max(_error(a, e), _ROUNDED_ONCE * _error(e.to(dtype), e))
        for a, b, e in zip(own, ours, exact, strict=True)
    )


def random_states(*shapes: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Normal random numbers in float32, the same ones each time."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def _run(function: Outputs, trial: Trial, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Outputs, and gradients of states and weights. In float64 for what is fixed too, if it is a 16-bit number."""
    rounded = (state.to(device, dtype if dtype.itemsize < 8 else torch.float64) for state in trial.states)
    leaves = [state.detach().requires_grad_() for state in rounded]
    fixed = [value.to(device, torch.float64) if dtype == torch.float64 else value.to(device) for value in trial.fixed]
    kept = [(weight.data, weight.requires_grad) for weight in trial.weights]
    try:
        for weight in trial.weights:
            weight.data = weight.data.to(device, dtype)
            weight.requires_grad_()  # a frozen one is a kernel's argument as well
        found = function(*leaves, *fixed)
        outputs = list(found) if isinstance(found, tuple) else [found]
        slopes = [slope.to(device, output.dtype) for slope, output in zip(_slopes(outputs), outputs, strict=True)]
        gradients = torch.autograd.grad(outputs, [*leaves, *trial.weights], slopes)
        return [output.detach() for output in outputs] + list(gradients)
    finally:
        for weight, (data, trained) in zip(trial.weights, kept, strict=True):
            weight.data = data
            weight.requires_grad_(trained)


def _slopes(outputs: Sequence[Tensor]) -> list[Tensor]:
    return random_states(*(output.shape for output in outputs), seed=1)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm())
