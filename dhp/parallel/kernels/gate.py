"""Gates of MLPs, act(gate) · up, in one compiled pass.

Shazeer 2020, GLU Variants Improve Transformer. Written out by hand there is nothing to gain: the library's own two
operations are as fast, and a form that keeps less has to compute the activation twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dhp.parallel.kernels.compile import compile_apart
from dhp.parallel.kernels.proof import Trial, random_states

Function = Callable[..., Any]
_ROWS, _WIDTH = 64, 256  # of the states of a trial
_APART, _TOGETHER = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")
_ACTIVATIONS = ("act_fn", "activation_fn")
_KEPT: dict[tuple[Any, ...], Function] = {}


def is_gated(module: nn.Module) -> bool:
    """Whether it has the matrices of a gated MLP, and an activation without weights."""
    named = dict(module.named_children())
    act = _activation(module)
    if act is None or next(act.parameters(), None) is not None:
        return False
    return any(named.keys() - set(_ACTIVATIONS) == set(matrices) for matrices in (_APART, _TOGETHER))


def forward(module: nn.Module) -> Function:
    """The MLP's forward with one kernel between its matrices."""
    name = _activation_name(module)

    def run(states: Tensor) -> Tensor:
        if hasattr(module, "gate_up_proj"):
            gate, up = module.gate_up_proj(states).chunk(2, -1)
        else:
            gate, up = module.gate_proj(states), module.up_proj(states)
        return module.down_proj(_gated(getattr(module, name), gate, up))

    return run


def trial(module: nn.Module) -> Trial:
    """The compiled gate against the class's own computation between its matrices. Without these: they may sum over
    ranks, and a rank on which the kernel fails must not leave others waiting."""
    act = getattr(module, _activation_name(module))

    def own(gate: Tensor, up: Tensor) -> Tensor:
        matrices = {
            "gate_proj": lambda _: gate,
            "up_proj": lambda _: up,
            "gate_up_proj": lambda _: torch.cat((gate, up), -1),
            "down_proj": lambda states: states,
        }
        return type(module).forward(SimpleNamespace(**matrices, **dict.fromkeys(_ACTIVATIONS, act)), gate)

    return Trial(own, partial(_gated, act), random_states(*[(_ROWS, _WIDTH)] * 2))


def _gated(act: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) · up. Compiled once for all modules with the same activation, and for each number of axes, with
    gradients and without: of each a compiler makes graphs for one row and for more."""
    return _compiled(act, gate.ndim, gate.dtype, torch.is_grad_enabled(), gate.requires_grad)(gate, up)


def _compiled(act: nn.Module, *kind: Any) -> Function:
    key = (type(act), repr(act), *kind)
    if key not in _KEPT:
        _KEPT[key] = compile_apart(lambda gate, up: act(gate) * up)
    return _KEPT[key]


def _activation(module: nn.Module) -> Any:
    name = _activation_name(module)
    return None if name is None else getattr(module, name)


def _activation_name(module: nn.Module) -> str | None:
    return next((name for name in _ACTIVATIONS if isinstance(getattr(module, name, None), nn.Module)), None)
