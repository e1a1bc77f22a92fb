"""The optimizer interface of a stage: AdamW, clipping, frozen stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dhp.core.errors import CheckpointError
from dhp.core.parameters import COMPENSATION, MASTER, MOMENTS, STATE_KINDS, SUM, ParameterGroup, StateForm
from dhp.core.state import StateSink, StateSource
from dhp.core.torch_private import scale_each
from dhp.parallel.tensor.slices import as_dtensors

STEP = "step"  # optimizer steps taken; parameters of a part step together


def step_for(optimizer: torch.optim.Optimizer, weight: Tensor, step: Tensor) -> Tensor:
    """The state's count of `step`s for `weight`: on its device where the optimizer is fused, else on the host, as torch
    has it."""
    device = weight.device if optimizer.defaults.get("fused") else torch.device("cpu")
    return step.to(device, torch.float32, copy=True)


def steps_taken(optimizer: torch.optim.Optimizer) -> Tensor:
    """The number of steps that the optimizer took, a scalar; 0 before its first. Its states can be read then."""
    if isinstance(optimizer, ScalingOptimizer):
        optimizer.settle()
    states: list[Mapping[str, Any]] = list(optimizer.state.values())
    return states[0][STEP].detach().clone() if states else torch.tensor(0.0)


def read_step(source: StateSource) -> Tensor:
    """The number of optimizer steps in a checkpoint. Raises CheckpointError where it is 0 beside moments, which would
    be dropped."""
    step = source.whole(STEP)
    if not step and any(name.endswith(STATE_KINDS) for name in source.names):
        raise CheckpointError("the optimizer's states say that it took no step, and there are moments of its steps")
    return step


class StageOptimizer(Protocol):
    """Gradients of a stage's weights, from each micro-batch's backward to the step that uses them up."""

    def forward(self, compute: Callable[[], Any]) -> Any:
        """Run `compute`, which uses the module, where the weights are whole; its tensors."""

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate the gradients of a scalar; with `last`, the step's final one, sum them over the ranks."""

    def rest(self) -> None:
        """No backward follows the forwards so far: free weights that were gathered for one."""

    def norm_sq(self) -> float:
        """Squared L2 norm of the stage's whole gradient, the same on every rank."""

    def gradient_bytes(self) -> int:
        """Bytes of the step's gradients now, beyond what is there between steps."""

    def step(self, rates: Rates, coefficient: float) -> None:
        """Scale the gradients by `coefficient`, take one optimizer step at `rates`, drop the gradients."""

    def drop(self) -> None:
        """Forget the step's gradients."""

    def save_weights(self, sink: StateSink) -> None:
        """Hand over the weights as the module has them."""

    def save_state(self, sink: StateSink) -> None:
        """Hand over the optimizer's state."""

    def load_state(self, source: StateSource) -> None:
        """Take back what `save_state` handed over."""


class TiedOptimizer(StageOptimizer, Protocol):
    """An optimizer that can share a weight with another stage's, rank by rank."""

    def tie(self, name: str, owns: bool) -> None:
        """The parameter `name` is another stage's too. The owner counts it in the norm and saves it."""

    def tied_gradient(self) -> Tensor:
        """This rank's share of the summed gradient of the tied weight, before the other's is added."""

    def add_tied(self, gradient: Tensor) -> None:
        """Add the other stage's share."""


Rates = float | Mapping[ParameterGroup, float]  # a learning rate for all parameters, or one for each group of them
GROUP = "group"  # in a group of an optimizer's parameters: the Group, as names of groups are for readers alone


def set_rates(groups: Sequence[dict[str, Any]], rates: Rates) -> None:
    """Set the learning rates of an optimizer's parameter groups."""
    for group in groups:
        group["lr"] = rates[group[GROUP]] if isinstance(rates, Mapping) else rates


class ScalingOptimizer(torch.optim.Optimizer):
    """An optimizer that multiplies gradients by `coefficient` where it reads them."""

    coefficient = 1.0

    def settle(self) -> None:
        """Wait until all states can be read."""


def clipped_step(
    optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], rates: Rates, coefficient: float
) -> None:
    """Take one step at `rates` with `gradients`, those of the optimizer's parameters, times `coefficient`.

    A fused optimizer divides by a scale where it reads each gradient, so that they are not written once more."""
    set_rates(optimizer.param_groups, rates)
    if isinstance(optimizer, ScalingOptimizer):
        optimizer.coefficient = coefficient
        optimizer.step()
        return
    scaled = coefficient != 1.0 and len(gradients) > 0
    if scaled and optimizer.defaults.get("fused") and gradients[0].dtype != torch.float64:  # the scale is float32
        optimizer.grad_scale = torch.full((), 1.0 / coefficient, dtype=torch.float32, device=gradients[0].device)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale
        return
    if scaled:
        scale_each(gradients, coefficient)
    optimizer.step()


_EXACT = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The format of master weights, gradient sums and optimizer state for a module that computes in `dtype`."""
    return _EXACT[dtype]


class Formats(NamedTuple):
    """Number formats of the states of a module. halved: its weights are halves of their master weights."""

    sums: torch.dtype
    moments: torch.dtype
    halved: bool

    @classmethod
    def of(cls, form: StateForm, dtype: torch.dtype) -> Formats:
        """Those of a form, where the module computes in 16 bits; else all are exact."""
        exact = exact_dtype(dtype)
        if dtype == exact:
            return cls(exact, exact, False)
        return cls(getattr(torch, form.format(SUM)), getattr(torch, form.format(MOMENTS[0])), form.compensated)


def widen(module: nn.Module, dtype: torch.dtype, frozen: torch.dtype | None = None) -> None:
    """Put parameters that are whole, or plain slices, into `dtype`, that of master weights, in place, and those that
    are not trained into `frozen`; None: into `dtype` too. Those that FSDP2 has cut are so already."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(dtype if parameter.requires_grad else frozen or dtype)


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Put parameters of `dtype` in place of the module's own, which stay as they are for callers that hold them.

    A parameter that two modules share stays shared. Buffers keep their format, and so do parameters that the model's
    class says must not be rounded to 16 bits (routers of some families, whose code multiplies in float32). What is kept
    in fewer bits is no number of its own and stays as it is."""
    kept = tuple(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    cast: dict[int, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            exact = any(pattern in f"{path}.{name}" for pattern in kept)
            if not parameter.is_floating_point():
                continue
            if id(parameter) not in cast:
                copy = parameter.detach().clone() if exact else parameter.detach().to(dtype)
                cast[id(parameter)] = nn.Parameter(copy, parameter.requires_grad)
            setattr(owner, name, cast[id(parameter)])


_FUSED = {"cuda", "cpu"}  # devices that have the kernel
_CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def make_adamw(
    named: Iterable[tuple[str, torch.nn.Parameter]],
    group: Callable[[str], ParameterGroup],
    betas: Sequence[float],
    eps: float,
) -> torch.optim.AdamW:
    """torch's AdamW by its fused kernel: one pass, and no temporary copy of a moment. The parameters of each `group`,
    by name, have a group of the optimizer, which says which."""
    return make_adamw_of(group_parameters(named, group), betas, eps)


def make_adamw_of(groups: Sequence[dict[str, Any]], betas: Sequence[float], eps: float) -> torch.optim.AdamW:
    """The same of groups of parameters."""
    there = {parameter.device.type for one in groups for parameter in one["params"]}
    fused = True if there and there <= _FUSED else None  # None: as torch chooses
    return torch.optim.AdamW(list(groups), betas=tuple(betas), eps=eps, fused=fused)


def group_parameters(
    named: Iterable[tuple[str, torch.nn.Parameter]], group: Callable[[str], ParameterGroup]
) -> list[dict[str, Any]]:
    """Groups of an optimizer's parameters, with the parameters' own names."""
    members: dict[ParameterGroup, dict[str, torch.nn.Parameter]] = {}
    for name, parameter in named:
        members.setdefault(group(name), {})[name] = parameter
    return [
        {
            GROUP: of,
            "names": list(own),
            "params": list(own.values()),
            "lr": of.learning_rate,
            "weight_decay": of.weight_decay,
        }
        for of, own in members.items()
    ]


def clip_coefficient(norm_sq_parts: Sequence[float], max_norm: float | None) -> tuple[float, float]:
    """The global gradient norm, and what every gradient is multiplied by so that the norm is at most `max_norm`.

    `norm_sq_parts` holds the squared norm of each part's gradients, every parameter counted once. The
    coefficient is min(1, max_norm / (norm + 1e-6)), as in torch; 1 when `max_norm` is None or 0. A norm
    that is not a number makes it not a number, so that broken gradients show."""
    norm = math.sqrt(math.fsum(norm_sq_parts))
    if not max_norm:
        return norm, 1.0
    ratio = max_norm / (norm + _CLIP_EPS)
    return norm, ratio if math.isnan(ratio) else min(1.0, ratio)


class Frozen:
    """The methods of `dhp.parallel.optim.base.StageOptimizer`, most of which do nothing.

    passes: gradients go through the stage to earlier ones. Where none do, no activations are saved."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, passes: bool):
        module.requires_grad_(False)
        if dtype != exact_dtype(dtype):
            cast_parameters(module, dtype)
        self._module, self._passes = module, passes
        self._others: str | None = None  # a parameter that another stage saves

    def tie(self, name: str, owns: bool) -> None:
        """The parameter `name` is another stage's too. The owner saves it."""
        self._others = None if owns else name

    def forward(self, compute: Callable[[], Any]) -> Any:
        """Run `compute`, under no_grad where no gradients pass."""
        with torch.set_grad_enabled(self._passes and torch.is_grad_enabled()):
            return compute()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Send gradients through; a micro-batch may have no tensor that requires any."""
        if loss.requires_grad:
            loss.backward()

    def rest(self) -> None:
        """Nothing to free: weights are not gathered."""

    def norm_sq(self) -> float:
        """0: frozen weights do not count."""
        return 0.0

    def gradient_bytes(self) -> int:
        """0: there are no gradients."""
        return 0

    def step(self, rates: Rates, coefficient: float) -> None:
        """Nothing is updated."""

    def drop(self) -> None:
        """There is nothing to drop."""

    def save_weights(self, sink: StateSink) -> None:
        """Hand over the weights, so that a checkpoint is whole."""
        for name, weight in as_dtensors(self._module).items():
            if name != self._others:
                sink.add(name, weight)

    def save_state(self, sink: StateSink) -> None:
        """Hand over that no step was taken."""
        sink.add_once(STEP, torch.tensor(0.0))

    def load_state(self, source: StateSource) -> None:
        """There is none."""


_HALF = 1 << 15  # half of the last place of a bfloat16 number, in last places of a float32 one


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 weight nearest to each finite float32 number, of two equally near ones the larger in magnitude, and
    as int16 what `join_master` adds to it."""
    bits = master.contiguous().view(torch.int32)
    upper = (bits + _HALF) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def join_master(weight: Tensor, compensation: Tensor) -> Tensor:
    """The float32 numbers of which `split_master` made these."""
    upper = weight.contiguous().view(torch.int16).to(torch.int32) << 16
    return (upper + compensation.to(torch.int32)).view(torch.float32)


def saved_master(name: str, weight: Tensor, saved: Collection[str], read: Callable[[str], Tensor]) -> Tensor | None:
    """The master weight of a parameter in a checkpoint of any form: saved itself, or as a compensation of the weight.
    None: it has neither, for its weights are not rounded; what was made of them holds.

    weight: of the same checkpoint, in any format. saved: names of all that is in it. read: returns what has a name."""
    if f"{name}.{COMPENSATION}" in saved:
        return join_master(weight.to(torch.bfloat16), read(f"{name}.{COMPENSATION}").to(weight.device))
    if f"{name}.{MASTER}" in saved:
        return read(f"{name}.{MASTER}").to(weight.device)
    return None
