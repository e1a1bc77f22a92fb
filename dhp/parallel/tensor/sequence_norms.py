"""Shards norms and residuals over the sequence, under tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dhp.core.errors import ModelError
from dhp.core.wrapping import wrap_forward
from dhp.parallel.comm import gather_alike, sum_scattered
from dhp.parallel.expert.expert_modules import is_experts
from dhp.parallel.kernels.replace import INNER
from dhp.parallel.recompute.saved_tensors import detached, in_part, note, runs_again, top_hooks
from dhp.parallel.tensor.styles import PARTIAL_OVER, entry_of, exit_by, exit_of, is_cut_whole, leaves_cut, style_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that share out tokens. group: None on the meta device, where there are shapes alone."""

    size: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> TensorRanks:
        """Those of a mesh of one axis."""
        return cls(mesh.size(), mesh.get_group())

    def share(self, tokens: int) -> int:
        """Tokens of one rank, with what fills them up."""
        return -(-tokens // self.size)

    def gather(self, share: Tensor, tokens: int) -> Tensor:
        """[share, hidden] → [tokens, hidden]."""
        if self.group is None:
            return share.new_empty(self.size * len(share), *share.shape[1:])[:tokens]
        return gather_alike(share, self.group).flatten(0, 1)[:tokens]

    def sum(self, states: Tensor) -> Tensor:
        """[tokens, hidden], a part of a sum → this rank's [share, hidden] of the sum."""
        filled = self._filled(states)
        if self.group is None:
            return filled.new_empty(len(filled) // self.size, *filled.shape[1:])
        return sum_scattered(filled, self.group)

    def own(self, states: Tensor) -> Tensor:
        """[tokens, hidden] → this rank's [share, hidden], in memory of its own."""
        rank = 0 if self.group is None else dist.get_rank(self.group)
        return self._filled(states).chunk(self.size)[rank].clone()

    def _filled(self, states: Tensor) -> Tensor:
        missing = self.share(len(states)) * self.size - len(states)
        return F.pad(states, (0, 0, 0, missing)) if missing else states


class _Gather(torch.autograd.Function):
    """[1, share, hidden] → [*shape, hidden] on every rank. summed: ranks have parts of its gradient; else all of it."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, shape: Shape, ranks: TensorRanks, summed: bool) -> Tensor:
        ctx.ranks, ctx.summed = ranks, summed
        return ranks.gather(share[0], prod(shape)).view(*shape, share.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        flat = grad.reshape(-1, grad.shape[-1])
        return (ctx.ranks.sum(flat) if ctx.summed else ctx.ranks.own(flat))[None], None, None, None


class _Scatter(torch.autograd.Function):
    """[*shape, hidden] → [1, share, hidden]. summed: ranks have parts of a sum; else the same states."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, ranks: TensorRanks, summed: bool) -> Tensor:
        ctx.ranks, ctx.shape = ranks, states.shape[:-1]
        flat = states.reshape(-1, states.shape[-1])
        return (ranks.sum(flat) if summed else ranks.own(flat))[None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.gather(grad[0], prod(ctx.shape)).view(*ctx.shape, grad.shape[-1]), None, None


def gather(share: Tensor, shape: Shape, ranks: TensorRanks, summed: bool) -> Tensor:
    """[1, share, hidden] of each rank → [*shape, hidden] on all. summed: ranks have parts of its gradient, which are
    added; else all of it."""
    return _Gather.apply(share, shape, ranks, summed)


def scatter(states: Tensor, ranks: TensorRanks, summed: bool) -> Tensor:
    """[*shape, hidden] → this rank's [1, share, hidden]. summed: of the sum over the ranks; else of what all have."""
    return _Scatter.apply(states, ranks, summed)


class _Again:
    """Gathered states of one call, as the share that they are gathered from again when backward first asks for them,
    until the last of those that saved them has had them."""

    def __init__(self, share: Any, unpack: Callable[[Any], Tensor], tokens: int, ranks: TensorRanks):
        self._share, self._unpack, self._tokens, self._ranks = share, unpack, tokens, ranks
        self._full: Tensor | None = None

    def take(self, size: Shape, stride: Shape, offset: int) -> Tensor:
        if self._full is None:
            self._full = self._ranks.gather(self._unpack(self._share)[0], self._tokens)
            note(self._full)
        return self._full.as_strided(size, stride, offset)


@contextmanager
def keeping_shares(full: Tensor, share: Tensor, ranks: TensorRanks) -> Iterator[None]:
    """In the block, what autograd saves of the gathered states `full` is kept as the share, and gathered again."""
    pack, unpack = top_hooks() or (detached, _same)
    storage, tokens = full.untyped_storage()._cdata, prod(full.shape[:-1])
    again: list[_Again] = []
    own = [share.detach()]

    def save(tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata != storage:
            return pack(tensor)
        if not again:
            again.append(_Again(pack(own[0]), unpack, tokens, ranks))
        return again[0], tuple(tensor.shape), tensor.stride(), tensor.storage_offset()

    def get(saved: Any) -> Tensor:
        if isinstance(saved, tuple) and saved and isinstance(saved[0], _Again):
            return saved[0].take(*saved[1:])
        return unpack(saved)

    with torch.autograd.graph.saved_tensors_hooks(save, get):
        yield
    again.clear()  # or the hooks, which the graph keeps, would keep them
    own.clear()


def _same(saved: Any) -> Any:
    return saved


class SequenceNorms:
    """The layers of a model on one rank, with their norms and residuals sharded over `ranks`.

    It has to be installed before anything else replaces forwards, so that a layer that runs again runs all of this
    again. Its calls carry rows × tokens of their states: when it runs again, other micro-batches may have come by."""

    def __init__(self, ranks: TensorRanks):
        self._ranks = ranks
        self._shape: Shape = ()
        self._spread = False  # between a chunk's first layer and its end

    def install(self, layers: Sequence[nn.Module]) -> None:
        """Shard these layers. Raises ModelError for a layer whose own code is not known to allow it."""
        for layer in layers:
            if any(True for _ in layer.parameters(recurse=False)):
                self._refuse(layer, "has parameters of its own beside those of its modules")
            for name, child in layer.named_children():
                self._install(layer, name, child)
            self._carry_shape(layer)

    def begin_at(self, layer: nn.Module) -> None:
        """The layer is the first of a chunk: it is given whole states."""
        layer.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)

    def end_at(self, module: nn.Module, norm: bool) -> None:
        """The module is the last of a chunk: what it gives leaves whole. norm: it is the one behind the layers."""
        if norm:
            self._mark(module)
        module.register_forward_hook(self._end)

    def whole_for(self, module: nn.Module) -> None:
        """The module is no layer, and is given whole states wherever it is called; what it keeps of them is divided."""
        inner = module.forward

        @wraps(inner)
        def forward(*args: Any, **named: Any) -> Any:
            return self._run_whole(inner, args, named, False) if self._spread else inner(*args, **named)

        wrap_forward(module, forward, __name__)

    def add(self, states: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """The states with `rows` [n, hidden] added at `places` of the flattened tokens."""
        if not self._spread:
            return states.flatten(0, 1).index_add(0, places, rows).view_as(states)
        whole = rows.new_zeros(prod(self._shape), rows.shape[-1]).index_add(0, places, rows)
        return states + scatter(whole, self._ranks, False)

    def _begin(self, _layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        states, put = _states(args, named)
        self._spread, self._shape = True, states.shape[:-1]
        return put(scatter(states, self._ranks, False))

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        self._spread = False
        return _change(output, lambda states: gather(states, self._shape, self._ranks, False))

    def _install(self, layer: nn.Module, name: str, child: nn.Module) -> None:
        if not any(True for _ in child.parameters()):
            return  # dropout and the like
        if _is_norm(child):
            self._mark(child)
        elif type(child).forward is nn.Module.forward:
            self._refuse(layer, f"keeps modules in {name}, a {type(child).__name__}, which it calls one by one")
        elif not list(child.children()):
            self._refuse(layer, f"multiplies its states by {name}, a matrix beside its attention and MLP")
        elif is_experts(child):
            self._refuse(layer, f"has its experts, {name}, beside their router")
        elif is_cut_whole(child):
            self._cut(child)
        else:
            self._whole(child)

    def _mark(self, norm: nn.Module) -> None:
        """Each rank has the part of its gradients that its own tokens give."""
        for module in norm.modules():
            setattr(module, PARTIAL_OVER, self._ranks.group)

    def _cut(self, block: nn.Module) -> None:
        """Projections that enter together, and one that ends the block: gathered states in, a sum's share out."""
        for module in block.modules():
            style = style_of(module)
            if leaves_cut(style):
                exit_by(module, lambda part: scatter(part, self._ranks, True))
                if self._ranks.group is None:
                    _leave_without_ranks(module)
                if getattr(module, "bias", None) is not None:
                    setattr(module, PARTIAL_OVER, self._ranks.group)
            elif style is not None:
                entry_of(module).entered = True
        self._wrap(block, True)

    def _whole(self, block: nn.Module) -> None:
        """What gives every rank whole states, and whole gradients, of whole states, as a router and its experts do."""
        self._wrap(block, False)

    def _wrap(self, block: nn.Module, cut: bool) -> None:
        inner = block.forward

        @wraps(inner)
        def forward(*args: Any, **named: Any) -> Any:
            output = self._run_whole(getattr(forward, INNER), args, named, cut)
            return output if cut else _change(output, lambda own: scatter(own, self._ranks, False))

        setattr(forward, INNER, inner)
        wrap_forward(block, forward, __name__)

    def _run_whole(self, inner: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], summed: bool) -> Any:
        """What `inner` makes of the gathered states. summed: ranks have parts of their gradient."""
        share, put = _states(args, named)
        full = gather(share, self._shape_of(share), self._ranks, summed)
        with self._gathering_again(full, share):
            args, named = put(full)
            return inner(*args, **named)

    def _shape_of(self, share: Tensor) -> Shape:
        """Of the states that a share is of: of other tokens than the row's where an MLP computes some at a time."""
        return (1, share.shape[1] * self._ranks.size) if in_part() else self._shape

    def _carry_shape(self, layer: nn.Module) -> None:
        inner = layer.forward

        @wraps(inner)
        def forward(*args: Any, row_shape: Shape, **named: Any) -> Any:
            self._shape = row_shape
            return inner(*args, **named)

        wrap_forward(layer, forward, __name__)
        layer.register_forward_pre_hook(
            lambda _, args, named: (args, named | {"row_shape": self._shape}), with_kwargs=True
        )

    def _gathering_again(self, full: Tensor, share: Tensor) -> AbstractContextManager[None]:
        """In the block, gathered states that autograd saves are kept as this rank's share. A layer that will run again
        gathers them again by itself."""
        return (
            nullcontext() if runs_again() or not torch.is_grad_enabled() else keeping_shares(full, share, self._ranks)
        )

    def _refuse(self, layer: nn.Module, why: str) -> None:
        raise ModelError(
            f"sequence_sharded_norms=true: a {type(layer).__name__} {why}, and that its states may be cut by tokens is "
            "not known. Leave sequence_sharded_norms out"
        )


def _states(
    args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Tensor, Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The states among the arguments of a layer or block, and the arguments with others in their place."""
    if args:
        return args[0], lambda states: ((states, *args[1:]), named)
    return named["hidden_states"], lambda states: (args, named | {"hidden_states": states})


def _change(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The output with its states changed, the first where there are several."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def _leave_without_ranks(module: Any) -> None:
    """On the meta device no style has given the module a forward."""

    def forward(states: Tensor) -> Tensor:
        make = exit_of(module)
        part = F.linear(states, module.weight)
        output = part if make is None else make(part)
        return output if module.bias is None else output + module.bias

    wrap_forward(module, forward, __name__)


def _is_norm(module: nn.Module) -> bool:
    return all(parameter.dim() == 1 for parameter in module.parameters()) and not list(module.children())
