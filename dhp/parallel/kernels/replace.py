"""Replaces elementwise operations of modules by proved kernels.

Norms, rotary positions and gates written out in float32 pieces, and their backward, move ten times the bytes that they
must. A replacement is put in only where it is proved at start, on the very device and number format, to give what the
module's own code gives, forward and backward; otherwise the module stays as it is."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dhp.config.rules import AUTO, COMPILED, KERNELS, ON_GPUS, PLAIN, WRITTEN
from dhp.core.errors import PartFailed
from dhp.core.reports import KernelUse
from dhp.core.transformers_private import renamed_inner, with_renamed_inner
from dhp.core.wrapping import wrap_forward
from dhp.parallel.comm import largest_in_place
from dhp.parallel.kernels import rotary
from dhp.parallel.kernels.elementwise import (
    can_compile,
    gate_forward,
    gate_trial,
    is_gated,
    is_norm,
    is_proved,
    norm_forwards,
    norm_trial,
)

Forward = Callable[..., Any]
Make = Callable[[nn.Module], Forward]  # a module's new forward
INNER = "dhp_inner"  # on a forward that is put around a module's own: the latter, which it calls by this name


class KernelChoice(NamedTuple):
    """A kernel for all modules of a class. find: proves it, and answers with the way to a module's new forward, or with
    None. Nothing is tried before."""

    kernel: str
    find: Callable[[], Make | None]


def replace_kernels(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    wanted: Mapping[str, str] | None = None,
) -> tuple[KernelUse, ...]:
    """Replace the forward of norms, gated MLPs and modules that apply rotary positions; which kernel serves which.

    group: all ranks of the part, of which all replace the same or none: what they hold alike must stay alike. wanted:
    by kind, a kernel of `KERNELS`, plain or auto. Parameters, names and hooks stay. All of the group together. Raises
    PartFailed where a wanted kernel does not serve."""
    wanted = dict.fromkeys(KERNELS, AUTO) | dict(wanted or {})
    classes = _classes(model)
    left = {
        name: [one for one in _candidates(kind, modules[0], device, dtype) if wanted[kind] in (AUTO, one.kernel)]
        for name, (kind, modules) in classes.items()
    }
    served = dict.fromkeys(classes, PLAIN)
    # The fastest kernel of each class first: proving a slower one, which may have to be compiled, costs seconds.
    while tried := [(name, one.kernel, _try(name, one)) for name, rest in left.items() for one in rest[:1]]:
        left = {name: rest[1:] for name, rest in left.items()}
        agreed = _agree([make is not None for *_, make in tried], device, group)
        for (name, kernel, make), all_have in zip(tried, agreed, strict=True):
            if all_have and make is not None:
                served[name], left[name] = kernel, []
                for module in classes[name][1]:
                    _replace(module, make(module))
    for name, (kind, _) in classes.items():
        _require(name, wanted[kind], served[name], device)
    return _uses({name: (kind, served[name], len(modules)) for name, (kind, modules) in classes.items()}, device)


def replace_without_weights(
    model: nn.Module, dtype: torch.dtype, wanted: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Replace norms and rotary positions of a model on the meta device by the written kernels, which save what GPUs'
    kernels save, but where `wanted` says plain. A norm's proof needs its weights, so ranks alone try it. Gates are
    compiled only where `wanted` says so: whether ranks have a compiler is not known here, and plain gates save more."""
    cpu = torch.device("cpu")
    for kind, modules in _classes(model).values():
        if wanted.get(kind) == PLAIN or kind == "gate" and wanted.get(kind) != COMPILED:
            continue
        make = _WRITTEN.get(kind) or _find_rotary(modules[0], WRITTEN, cpu, dtype)
        for module in modules if make is not None else ():
            _replace(module, make(module))


_WRITTEN: Mapping[str, Make] = {
    "norm": lambda module: norm_forwards(module, WRITTEN)[0],
    "gate": lambda module: gate_forward(module, WRITTEN),
}


def left_to_compiler(wanted: Mapping[str, str]) -> dict[str, str]:
    """Where whole layers are compiled: their rotary positions and gates stay as they are, unless a kernel is asked for,
    since the compiler fuses them with their neighbours."""
    return {"rotary": PLAIN, "gate": PLAIN} | {kind: kernel for kind, kernel in wanted.items() if kernel != AUTO}


def require_compiler(part: str, wanted: Mapping[str, str]) -> None:
    """Raises PartFailed where a compiled kernel is asked for and nothing makes kernels here. Before anything is
    loaded."""
    if COMPILED in wanted.values() and not can_compile():
        raise PartFailed(
            f"{part}.kernels={','.join(f'{kind}:{kernel}' for kind, kernel in wanted.items())}: triton and a "
            "C compiler, with which torch.compile makes GPU kernels, are not both on this node. Install them, or leave "
            f"{part}.kernels out"
        )


def _uses(served: Mapping[str, tuple[str, str, int]], device: torch.device) -> tuple[KernelUse, ...]:
    """Modules counted by kind and kernel."""
    counts: Counter[tuple[str, str]] = Counter()
    for kind, kernel, count in served.values():
        counts[kind, kernel] += count
    return tuple(
        KernelUse(kind, kernel, count, _faster(kind, kernel, device))
        for (kind, kernel), count in sorted(counts.items())
    )


def _faster(kind: str, kernel: str, device: torch.device) -> str | None:
    """A faster kernel for this device, where a compiler is all that it lacks."""
    best = KERNELS[kind][0]
    if device.type != "cuda" or best != COMPILED or kernel == COMPILED:
        return None
    return f"{kind} {COMPILED}, which needs triton and a C compiler on each node, and its proof to hold"


def _classes(model: nn.Module) -> dict[str, tuple[str, list[nn.Module]]]:
    """Modules by what they do, their class and whether they have weights, in the model's order: kind, and all modules.
    Those whose forward was replaced before are left alone."""
    found: dict[str, tuple[str, list[nn.Module]]] = {}
    for module in model.modules():
        if _is_replaced(module):
            continue
        kinds = {"norm": is_norm(module), "gate": is_gated(module), "rotary": bool(_rotaries(module))}
        for kind in (kind for kind, is_one in kinds.items() if is_one):
            bare = " without weights" if next(module.parameters(), None) is None else ""
            found.setdefault(f"{kind} of {type(module).__name__}{bare}", (kind, []))[1].append(module)
    return found


def _is_replaced(module: nn.Module) -> bool:
    """Whether another forward than its class's computes; one around it, which has it as `INNER`, does not count."""
    own = vars(module).get("forward")
    return own is not None and getattr(getattr(own, INNER, None), "__func__", None) is not type(module).forward


def _replace(module: nn.Module, forward: Forward) -> None:
    own = vars(module).get("forward")
    if hasattr(own, INNER):
        setattr(own, INNER, forward)
    else:
        wrap_forward(module, forward, __name__)


def _candidates(kind: str, module: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[KernelChoice]:
    """The same ones on all ranks, whether or not their nodes can compile: they have to agree on them."""
    for kernel in KERNELS[kind]:
        if device.type == "cuda" or kernel not in ON_GPUS:
            yield KernelChoice(kernel, partial(_FINDS[kind], module, kernel, device, dtype))


def _find_norm(module: nn.Module, kernel: str, device: torch.device, dtype: torch.dtype) -> Make | None:
    wide = torch.promote_types(dtype, torch.float32)  # small states in 16 bits are mostly rounding
    for number, forward in enumerate(norm_forwards(module, kernel)):
        small, usual = norm_trial(module, forward, small=True), norm_trial(module, forward)
        if is_proved(usual, device, dtype) and is_proved(small, device, wide):
            return lambda other, number=number: norm_forwards(other, kernel)[number]
    return None


def _find_gate(module: nn.Module, kernel: str, device: torch.device, dtype: torch.dtype) -> Make | None:
    return gate_forward if is_proved(gate_trial(module), device, dtype) else None


def _find_rotary(module: nn.Module, kernel: str, device: torch.device, dtype: torch.dtype) -> Make | None:
    own = _rotaries(module)
    found = {name: rotary.in_one_pass(function, device, dtype, kernel == COMPILED) for name, function in own.items()}
    proved = {name: function for name, function in found.items() if function is not None}
    return partial(_calling, proved) if proved else None


_FINDS: Mapping[str, Callable[..., Make | None]] = {"norm": _find_norm, "gate": _find_gate, "rotary": _find_rotary}


def _rotaries(module: nn.Module) -> dict[str, Forward]:
    """Functions of the library that turn by rotary positions, which the forward of the module's class calls by name."""
    forward = renamed_inner(type(module).forward)
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return {}
    named = {name: forward.__globals__.get(name) for name in forward.__code__.co_names if "rot" in name}
    return {
        name: function for name, function in named.items() if inspect.isfunction(function) and _takes_angles(function)
    }


def _takes_angles(function: Forward) -> bool:
    return {"cos", "sin"} <= inspect.signature(function).parameters.keys()


def _calling(functions: Mapping[str, Forward], module: nn.Module) -> Forward:
    """The forward of the module's class, which calls these functions in the place of those of its own file. The file,
    and other models' modules, keep theirs."""
    own = renamed_inner(type(module).forward)
    code, names = own.__code__, own.__globals__ | dict(functions)
    forward = FunctionType(code, names, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__, forward.__annotations__ = own.__kwdefaults__, own.__annotations__
    return MethodType(with_renamed_inner(type(module).forward, forward), module)


def _try(name: str, candidate: KernelChoice) -> Make | None:
    """A kernel that fails counts as missing; the rank's log says so."""
    if candidate.kernel == COMPILED and not can_compile():
        return None
    try:
        return candidate.find()
    except Exception as error:
        print(f"{name}: no {candidate.kernel} kernel ({type(error).__name__}: {str(error)[:200]})", flush=True)
        return None


def _agree(proved: Sequence[bool], device: torch.device, group: dist.ProcessGroup) -> list[bool]:
    """The candidates that are proved on all ranks. All of them together."""
    refused = torch.tensor([0.0 if one else 1.0 for one in proved], device=device)
    return [not refuses for refuses in largest_in_place(refused, group).tolist()] if proved else []


def _require(name: str, wanted: str, served: str, device: torch.device) -> None:
    if wanted not in (AUTO, served):
        raise PartFailed(
            f"{name}: its kernel {wanted} was asked for and does not serve on {device.type}: it is not there, or does "
            "not give what the module's own code gives; the rank's log says more. Set kernels to auto."
        )
