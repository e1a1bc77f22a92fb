"""Slices of matrices, experts and adapters, as ordinary parameters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from dhp.core.axes import EXPERTS
from dhp.core.errors import ModelError
from dhp.core.parameters import ADAPTER
from dhp.core.torch_private import StridedShard
from dhp.core.wrapping import wrap_forward
from dhp.parallel.comm import HOLDERS, exchange_rows, sum_in_place
from dhp.parallel.expert.expert_modules import DOWN, GATE_UP, experts_of
from dhp.parallel.tensor.styles import COLUMNS, PARTIAL_OVER, ROWS, Entry, HeadRows, entry_of, exit_of, sum_of_ranks

_CUTS = "dhp_cuts"  # on a module: by parameter, its `AdapterCut`


@dataclass(frozen=True)
class AdapterCut:
    """How a parameter of `shape` is cut over the ranks of `mesh`; `placements` as DTensor has them."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size

    @property
    def tensor_ranks(self) -> dist.ProcessGroup | None:
        """The ranks that work on the same tokens and hold other slices; None: replicas alone hold the rest."""
        names = self.mesh.mesh_dim_names or ("",)
        return None if names == (EXPERTS,) else self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def holders(self) -> dist.ProcessGroup:
        """The ranks that hold the whole together."""
        return (self.mesh if self.mesh.ndim == 1 else self.mesh._flatten(HOLDERS)).get_group()

    def around(self, local: Tensor) -> DTensor:
        """The DTensor of which `local` is this rank's slice, on its memory and graph."""
        strides = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=strides)


def mark_cut(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Remember that the module's parameter is this rank's slice along `dim`, one of equal ones over `mesh`."""
    shape = list(module.get_parameter(name).shape)
    shape[dim] *= mesh.size()
    mark(module, name, AdapterCut(mesh, (Shard(dim),), torch.Size(shape)))


def mark(module: nn.Module, name: str, cut: AdapterCut) -> None:
    """Remember how the module's parameter `name`, this rank's slice, is cut."""
    module.__dict__.setdefault(_CUTS, {})[name] = cut


def use_local_slices(model: nn.Module) -> None:
    """Put this rank's slice in the place of each parameter that is a DTensor, without a copy but where it would keep
    the memory of the whole one.

    A parameter that two modules share stays shared."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not isinstance(parameter, DTensor):
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(_alone(parameter.detach().to_local()), parameter.requires_grad)
            mark(module, name, AdapterCut(parameter.device_mesh, parameter.placements, parameter.shape))
            module.register_parameter(name, made[id(parameter)])


def _alone(local: Tensor) -> Tensor:
    return local.clone() if local.untyped_storage().nbytes() > local.nbytes else local


def cut_of(module: nn.Module, name: str) -> AdapterCut | None:
    """The cut of the module's own parameter `name`; None where every rank holds all of it."""
    return module.__dict__.get(_CUTS, {}).get(name)


def as_dtensor(module: nn.Module, name: str) -> Tensor:
    """The module's own parameter `name`; the DTensor that it is a slice of where it is one."""
    parameter, cut = module.get_parameter(name), cut_of(module, name)
    return parameter if cut is None else cut.around(parameter)


def as_dtensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter as `as_dtensor` has it, in the order and by the names of `named_parameters`."""
    return {name: as_dtensor(owner, own) for name, owner, own in owned_parameters(module)}


def owned_parameters(module: nn.Module) -> Sequence[tuple[str, nn.Module, str]]:
    """Each parameter's full name, the module that owns it and its name there, as `named_parameters` orders them."""
    owners = {
        (f"{prefix}." if prefix else "") + own: (owner, own)
        for prefix, owner in module.named_modules()
        for own in owner._parameters
    }
    return [(name, *owners[name]) for name, _ in module.named_parameters()]


def partial_over(module: nn.Module, name: str) -> dist.ProcessGroup | None:
    """The ranks over which gradients of the module's own parameter `name` are parts of a sum; None where a rank's are
    whole: they see all, or only it has these values."""
    cut = cut_of(module, name)
    whole = cut is None or all(placement.is_replicate() for placement in cut.placements)
    return module.__dict__.get(PARTIAL_OVER) if whole else None


class _Entering(nn.Module):
    """An adapter's input: it enters the ranks' cut, as the matrix's input does; then dropout is applied."""

    def __init__(self, dropout: nn.Module, entry: Entry, group: dist.ProcessGroup):
        super().__init__()
        self._dropout, self._entry, self._group = dropout, entry, group

    def forward(self, states: Tensor) -> Tensor:
        return self._dropout(self._entry.enter(states, self._group))


def cut_adapters(layers: Iterator[tuple[str, Any]], mesh: DeviceMesh) -> None:
    """Cut the adapters of these layers as their matrices are cut over `mesh`. They come whole and alike."""
    group = mesh.get_group()
    for _, layer in layers:
        base, into, out = layer.base_layer, layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
        cut = cut_of(base, "weight")
        rows, columns = base.__dict__.get(ROWS), base.__dict__.get(COLUMNS)
        if rows is not None:
            _compute_rows(out, rows)
            setattr(out, PARTIAL_OVER, group)
            _enter(layer, base, into, group)
        elif columns is not None:
            layer.lora_dropout[ADAPTER].first_column = columns.start
            setattr(into, PARTIAL_OVER, group)
            _leave(layer, base, columns, group)
        elif cut is None or all(placement.is_replicate() for placement in cut.placements):
            if base.__dict__.get(PARTIAL_OVER) is not None:  # each rank has some of the tokens
                setattr(into, PARTIAL_OVER, group)
                setattr(out, PARTIAL_OVER, group)
        elif cut.placements[0].dim == 0:
            take_slice(out, mesh, cut.placements[0])
            _enter(layer, base, into, group)
        else:
            # Dropout draws by column of the whole matrix; what stands there without any reads nothing. The last slice
            # of a width that does not divide is narrower.
            width, rank = into.weight.shape[1], mesh.get_local_rank()
            _, first = Shard.local_shard_size_and_offset(width, mesh.size(), rank)
            layer.lora_dropout[ADAPTER].first_column = first
            take_slice(into, mesh, Shard(1))
            _leave(layer, base, slice(None), group)


def sum_without_ranks(layers: Iterator[tuple[str, Any]]) -> None:
    """Adapters of slices on the meta device leave the cut as their matrices do, where these do not keep all tokens."""
    for _, layer in layers:
        rows, columns = layer.base_layer.__dict__.get(ROWS), layer.base_layer.__dict__.get(COLUMNS, slice(None))
        if rows is not None:
            _compute_rows(layer.lora_B[ADAPTER], rows)
        if exit_of(layer.base_layer) is not None or columns.stop is not None:
            _leave(layer, layer.base_layer, columns, None)


def _enter(layer: Any, base: nn.Module, into: nn.Linear, group: dist.ProcessGroup) -> None:
    entry = entry_of(base)
    entry.join()
    layer.lora_dropout[ADAPTER] = _Entering(layer.lora_dropout[ADAPTER], entry, group)
    setattr(into, PARTIAL_OVER, group)


def take_slice(module: Any, mesh: DeviceMesh, placement: Placement) -> None:
    """Leave the module this rank's slice of its weight."""
    whole = module.weight
    local = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None).to_local()
    module.weight = nn.Parameter(local.contiguous(), whole.requires_grad)
    mark(module, "weight", AdapterCut(mesh, (placement,), whole.shape))


def _leave(layer: Any, base: nn.Module, columns: slice, group: dist.ProcessGroup | None) -> None:
    """What the adapter's first matrix makes of its `columns` leaves the cut as the output of the matrix it stands
    beside does."""
    into, out, make = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER], exit_of(base)

    def forward(states: Tensor) -> Tensor:
        part = F.linear(states, into.weight[:, columns])
        if make is not None:
            return make(part)
        return part if group is None else sum_of_ranks(part, group)

    wrap_forward(into, forward, __name__)
    if make is not None and group is not None:
        setattr(out, PARTIAL_OVER, group)


def _compute_rows(module: nn.Linear, rows: HeadRows) -> None:
    wrap_forward(module, lambda states: rows.product(states, module.weight, None), __name__)


_PLACES: dict[str, Placement] = {GATE_UP: StridedShard(1, split_factor=2), DOWN: Shard(2)}


def cut_widths(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of `mesh`, the tensor ranks, its slice of the width of all experts that they have together, in a
    model that was read by shares and has plain tensors (`dhp.parallel.tensor.slices`), and let it compute with it.

    Raises ModelError where the width is no multiple of the ranks."""
    for name, experts in experts_of(model).items():
        for own, place in _PLACES.items():
            cut = cut_of(experts, own)
            shape = None if cut is None else cut.shape
            if shape is None:
                raise ModelError(f"{name}.{own} was not read by shares; the tensor-parallel plan leaves experts out")
            width = shape[2] if own == DOWN else shape[1] // 2
            if width % mesh.size():
                raise ModelError(
                    f"tensor parallelism cannot cut the inner width of {name}: width({width}) % "
                    f"tensor({mesh.size()}) = {width % mesh.size()} != 0. Set text.tensor to a divisor of {width}"
                )
            whole = experts.get_parameter(own)
            replicas = cut.placements[:-1]  # among which experts are shared out, before tensor ranks cut them
            count = shape[0] // (cut.mesh.size(0) if replicas else 1)
            by_rank = _slices_of(own, whole.detach(), mesh.size())
            alike = cut.placements[-1].is_replicate()  # they are too few for all ranks to have some: all have all
            slices = (
                by_rank[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
                if alike
                else _exchange(by_rank, count, mesh)
            )
            slices = slices if own == DOWN else slices.flatten(1, 2)
            experts._parameters[own] = nn.Parameter(slices, whole.requires_grad)
            mark(experts, own, AdapterCut(cut.mesh if replicas else mesh, (*replicas, place), shape))
        _enter_and_sum(experts, mesh.get_group())


def _slices_of(own: str, held: Tensor, ranks: int) -> Tensor:
    """Each rank's slices of some experts, [ranks, experts, …]; of gate and up one behind another."""
    experts, out, inner = held.shape
    if own == DOWN:
        return held.view(experts, out, ranks, inner // ranks).permute(2, 0, 1, 3)
    return held.view(experts, 2, ranks, out // 2 // ranks, inner).permute(2, 0, 1, 3, 4)


def _exchange(by_rank: Tensor, count: int, mesh: DeviceMesh) -> Tensor:
    """From some experts whole to a slice of each of `count`."""
    ranks, experts = by_rank.shape[:2]
    coming = [Shard.local_shard_size_and_offset(count, ranks, rank)[0] for rank in range(ranks)]
    return exchange_rows(by_rank.flatten(0, 1), [experts] * ranks, coming, mesh.get_group())


def _enter_and_sum(experts: nn.Module, group: dist.ProcessGroup) -> None:
    inner = experts.forward

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        states, weights = _Enter.apply(hidden_states, top_k_weights, group)
        return sum_of_ranks(inner(states, top_k_index, weights), group)

    wrap_forward(experts, forward, __name__)


class _Enter(torch.autograd.Function):
    """Megatron's f of states and weights: identity forward; backward, one sum over the ranks of both gradients."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weights: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        ctx.group = group
        return states.view_as(states), weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exact = torch.promote_types(*(grad.dtype for grad in grads))
        flat = torch.cat([grad.to(exact).flatten() for grad in grads])
        sum_in_place(flat, ctx.group)
        summed = zip(grads, flat.split([grad.numel() for grad in grads]), strict=True)
        return *(own.view_as(grad).to(grad.dtype) for grad, own in summed), None
