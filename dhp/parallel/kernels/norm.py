"""RMS norms in few passes, in place of a module's own forward, which goes through float32 piece by piece.

Zhang and Sennrich 2019, Root Mean Square Layer Normalization, section 3. Models differ in how the weight is meant: as
it is, or as an offset from one; a proof says which.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dhp.config.rules import COMPILED, TORCH
from dhp.parallel.kernels.compile import compile_apart
from dhp.parallel.kernels.proof import Trial, random_states

Function = Callable[..., Any]
_SMALL = 2.0**-10  # squared, as much as the usual eps
_ROWS, _WIDTH = 64, 256  # of the states of a trial; of a norm without weights the width too


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor | None, eps: float, offset: float, compiled: bool) -> Tensor:
        function = _compiled(normed, offset, states.ndim) if compiled else normed
        # Detached: for a compiler, tensors that need gradients are others than those that do not.
        output, inverse = function(states.detach(), None if weight is None else weight.detach(), eps, offset)
        ctx.save_for_backward(states, inverse, weight)
        ctx.offset, ctx.compiled = offset, compiled
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        states, inverse, weight = ctx.saved_tensors
        function = _compiled(gradients, ctx.offset, states.ndim) if ctx.compiled else gradients
        fixed = None if weight is None else weight.detach()
        of_states, of_weight = function(gradient, states.detach(), inverse, fixed, ctx.offset, ctx.needs_input_grad[1])
        return of_states, of_weight, None, None, None


def normed(states: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """states [..., width] by their root mean square, times (offset + weight) [width]; and the inverse of that root
    [..., 1]. Both in float32 meanwhile where states have 16 bits."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    mean = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / states.shape[-1]
    inverse = (mean + eps).rsqrt()
    output = wide * inverse
    if weight is not None:
        output = output.mul_(_factor(weight, offset, output.dtype))
    return output.to(states.dtype), inverse


def gradients(
    gradient: Tensor, states: Tensor, inverse: Tensor, weight: Tensor | None, offset: float, of_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `states`, and of `weight` where that is asked for, of what `normed` computed."""
    unit = states.to(inverse.dtype) * inverse
    slope, into_weight = gradient.to(inverse.dtype), None
    if weight is not None:
        if of_weight:
            into_weight = (slope * unit).flatten(0, -2).sum(0).to(weight.dtype)
        slope = slope * _factor(weight, offset, slope.dtype)
    along = torch.linalg.vecdot(slope, unit).unsqueeze(-1) / states.shape[-1]
    return ((slope - unit * along) * inverse).to(states.dtype), into_weight


def _factor(weight: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) + offset if offset else weight.to(dtype)


@cache
def _compiled(function: Function, offset: float, axes: int) -> Function:
    """One for each number of axes too: of each a compiler makes graphs for one row, for one head, and for more."""
    return compile_apart(function)


def is_norm(module: nn.Module) -> bool:
    """Whether it may be an RMS norm over the last axis, of whatever kind."""
    own = dict(module.named_parameters(recurse=False))
    return type(module).__name__.endswith("RMSNorm") and _eps(module) is not None and set(own) <= {"weight"}


def forwards(module: nn.Module, kernel: str) -> list[Function]:
    """Possible replacements of the norm's forward, by one kernel."""
    weight, eps = dict(module.named_parameters(recurse=False)).get("weight"), _eps(module)
    if weight is None:
        return [] if kernel == TORCH else [lambda states: _Norm.apply(states, None, eps, 0.0, kernel == COMPILED)]
    if kernel == TORCH:
        return [lambda states: F.rms_norm(states, module.weight.shape, module.weight, eps)]
    return [
        lambda states, offset=offset: _Norm.apply(states, module.weight, eps, offset, kernel == COMPILED)
        for offset in (0.0, 1.0)
    ]


def trial(module: nn.Module, forward: Function, small: bool = False) -> Trial:
    """`forward` against the norm's own. small: of states so small that eps decides."""
    weights = list(module.parameters(recurse=False))
    width = weights[0].shape[-1] if weights else _WIDTH
    states = [one * _SMALL if small else one for one in random_states((_ROWS, width))]
    return Trial(module.forward, forward, states, (), weights)


def _eps(module: nn.Module) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))
