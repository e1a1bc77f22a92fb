"""Compiles norms and gates into few passes, proved equal."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from shutil import which
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dhp.config.rules import COMPILED, TORCH
from dhp.core.torch_private import tell_sizes_apart
from dhp.core.wrapping import wrap_forward

# Of inductor: it is not to sum a norm's gradients in another way for few rows. That makes more graphs where lengths
# vary, and kernels for many rows that a trial of few has not proved.
ALL_SIZES = {"triton.mix_order_reduction_non_strict_mode": True}


def compile_layers(layers: Sequence[nn.Module], eager_classes: Collection[str]) -> None:
    """Compile the forward of each layer, at its first call. Names of modules and parameters stay.

    eager_classes: classes of modules inside, by name, that run as they are. Layers of one class share what is compiled.
    """
    tell_sizes_apart()
    for layer in layers:
        for module in layer.modules():
            if type(module).__name__ in eager_classes:
                wrap_forward(module, eager(module.forward), __name__)
        wrap_forward(layer, torch.compile(layer.forward, dynamic=True, options=ALL_SIZES), __name__)


def can_compile() -> bool:
    """triton makes the kernels, and builds what launches them with a C compiler, on each node."""
    return find_spec("triton") is not None and any(map(which, (os.environ.get("CC") or "cc", "gcc", "clang")))


def compile_apart(function: FunctionType, settings: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """`function` compiled for one kind of call, as often as it is asked for. torch counts the graphs that it makes of
    a function by the function's code object and runs it as it is behind eight, so each kind gets a code object.

    settings: of torch's inductor."""
    own = FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    return torch.compile(own, dynamic=True, options=ALL_SIZES | dict(settings or {}))


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, at which a compiled layer has a graph break: plans of segments differ from step to step."""
    return torch.compiler.disable(function)


Outputs = Callable[..., Any]  # of tensors: one tensor, or several
_NEAR = {torch.float32: 1e-6, torch.float64: 1e-12}  # relative to the module's own code
_ROUNDED_ONCE = 1.05  # a 16-bit result is right where its error is that of rounding the exact one, or the module's own


class Trial(NamedTuple):
    """What is compared: `own` and `ours`, each a function of `states`, and of `fixed` behind them.

    states: in float32; both functions take them in the part's format, and get gradients. fixed: in the format in which
    they are used. weights: parameters that both use themselves, put into the part's format meanwhile."""

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


def gate_forward(module: nn.Module, kernel: str = COMPILED) -> Function:
    """The MLP's forward with one kernel between its matrices. kernel: compiled, or written, which saves what a compiled
    one saves."""
    name, gated = _activation_name(module), _gated if kernel == COMPILED else _Gate.apply

    def run(states: Tensor) -> Tensor:
        if hasattr(module, "gate_up_proj"):
            gate, up = module.gate_up_proj(states).chunk(2, -1)
        else:
            gate, up = module.gate_proj(states), module.up_proj(states)
        return module.down_proj(gated(getattr(module, name), gate, up))

    return run


def gate_trial(module: nn.Module) -> Trial:
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
    return _compiled_gate(act, gate.ndim, gate.dtype, torch.is_grad_enabled(), gate.requires_grad)(gate, up)


def _compiled_gate(act: nn.Module, *kind: Any) -> Function:
    key = (type(act), repr(act), *kind)
    if key not in _KEPT:
        _KEPT[key] = compile_apart(lambda gate, up: act(gate) * up)
    return _KEPT[key]


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, act: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
        ctx.act = act
        ctx.save_for_backward(gate, up)
        return act(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        leaves = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.act(leaves[0]) * leaves[1]
        return None, *torch.autograd.grad(output, leaves, gradient)


def _activation(module: nn.Module) -> Any:
    name = _activation_name(module)
    return None if name is None else getattr(module, name)


def _activation_name(module: nn.Module) -> str | None:
    return next((name for name in _ACTIVATIONS if isinstance(getattr(module, name, None), nn.Module)), None)


_SMALL = 2.0**-10  # squared, as much as the usual eps
_NORM_ROWS, _NORM_WIDTH = 64, 256  # of the states of a trial; of a norm without weights the width too


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor | None, eps: float, offset: float, compiled: bool) -> Tensor:
        function = _compiled_norm(normed, offset, states.ndim) if compiled else normed
        # Detached: for a compiler, tensors that need gradients are others than those that do not.
        output, inverse = function(states.detach(), None if weight is None else weight.detach(), eps, offset)
        ctx.save_for_backward(states, inverse, weight)
        ctx.offset, ctx.compiled = offset, compiled
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        states, inverse, weight = ctx.saved_tensors
        function = _compiled_norm(gradients, ctx.offset, states.ndim) if ctx.compiled else gradients
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
def _compiled_norm(function: Function, offset: float, axes: int) -> Function:
    """One for each number of axes too: of each a compiler makes graphs for one row, for one head, and for more."""
    return compile_apart(function)


def is_norm(module: nn.Module) -> bool:
    """Whether it may be an RMS norm over the last axis, of whatever kind."""
    own = dict(module.named_parameters(recurse=False))
    return type(module).__name__.endswith("RMSNorm") and _eps(module) is not None and set(own) <= {"weight"}


def norm_forwards(module: nn.Module, kernel: str) -> list[Function]:
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


def norm_trial(module: nn.Module, forward: Function, small: bool = False) -> Trial:
    """`forward` against the norm's own. small: of states so small that eps decides."""
    weights = list(module.parameters(recurse=False))
    width = weights[0].shape[-1] if weights else _NORM_WIDTH
    states = [one * _SMALL if small else one for one in random_states((_NORM_ROWS, width))]
    return Trial(module.forward, forward, states, (), weights)


def _eps(module: nn.Module) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))
