"""Tensor-parallel styles on plain tensors, without DTensor.

Megatron-LM (Shoeybi et al. 2019, section 3): matrices whose outputs are cut are entered by *f*, which is the identity
forward and sums gradients over the ranks backward; matrices whose inputs are cut end in *g*, which sums forward and is
the identity backward. Projections of one input (query, key and value; gate and up) enter together, so that half a layer
sums once in each direction. transformers' own styles sum the gradient of each projection by itself, through DTensor,
whose dispatch takes three to four times the host's time of a layer.

With fewer key/value heads than tensor ranks, `ranks / heads` neighbours need the same head. Each rank keeps the whole
projection (it is small), computes the one head its query heads attend to, and the projection's gradients, of which
each rank has the part that its query heads give, are summed over the tensor ranks once a step. Where ranks do not
divide the heads, all four projections of attention are kept and computed so, with a rank's heads as
`dhp.core.heads.head_range` has them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import (
    ColwiseParallel,
    EmbeddingParallel,
    RowwiseParallel,
    TensorParallelLayer,
)

from dhp.core.heads import KEY, OUTPUT, Projection, head_range
from dhp.core.torch_private import StridedShard, local_shape_and_offset
from dhp.core.wrapping import wrap_forward
from dhp.parallel.comm import sum_in_place
from dhp.parallel.kernels.padded import product

PARTIAL_OVER = "dhp_partial_over"  # on a module: the ranks over which its gradients are parts of a sum
ROWS = "dhp_rows"  # on a module that every rank holds whole: the `HeadRows` with which this one computes
COLUMNS = "dhp_columns"  # on such a module whose inputs are cut: the columns
_ENTRY = "dhp_entry"  # on a module: the `Entry` that it shares with its siblings
_EXIT = "dhp_exit"  # on a module whose inputs are cut: what makes its output of this rank's part, if not g
_STYLE = "dhp_style"  # on a module: the name of its style


class _ToAllRanks(torch.autograd.Function):
    """Megatron's f: identity forward; the gradients of all tensor ranks are summed backward."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_in_place(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class _SumOfRanks(torch.autograd.Function):
    """Megatron's g: the parts of all tensor ranks are summed forward, in place; identity backward."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(part)
        return sum_in_place(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def sum_of_ranks(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """g: the sum of the parts of all tensor ranks, written over `part`; each part gets the sum's gradient."""
    return _SumOfRanks.apply(part, group)


class Entry:
    """The f that sibling projections share: the first to be given an input enters it, the others find it entered."""

    def __init__(self, siblings: int = 1):
        self._siblings, self._left = siblings, 0
        self.entered = False  # inputs come from what sums their gradients itself
        self._given: Tensor | None = None
        self._entered: Tensor | None = None

    def join(self) -> None:
        """One more will enter."""
        self._siblings += 1

    def enter(self, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        """`states` as all ranks hold them; their gradient will be the sum over the ranks, for every consumer."""
        if self.entered:
            return states
        if self._given is not states:
            self._given, self._left = states, self._siblings
            self._entered = _ToAllRanks.apply(states, group)
        entered, self._left = self._entered, self._left - 1
        if not self._left:  # or it would keep the states of a layer that is recomputed
            self._given = self._entered = None
        return entered


def share_entry(siblings: list[nn.Module]) -> None:
    """Let modules that are given the same input enter it together."""
    entry = Entry(len(siblings))
    for module in siblings:
        setattr(module, _ENTRY, entry)


def entry_of(module: nn.Module) -> Entry:
    return module.__dict__.setdefault(_ENTRY, Entry())


def exit_by(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Let a module whose inputs are cut make its output of this rank's part by `make`, in the place of g."""
    setattr(module, _EXIT, make)


def exit_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """What `exit_by` has set."""
    return module.__dict__.get(_EXIT)


def name_style(module: nn.Module, style: str) -> None:
    """Remember the style of a module."""
    setattr(module, _STYLE, style)


def style_of(module: nn.Module) -> str | None:
    """The name of the module's style; None where the plan leaves it out."""
    return module.__dict__.get(_STYLE)


class Colwise(ColwiseParallel):
    """A linear layer whose outputs are cut: [..., in] → this rank's [..., out / ranks]."""

    def install_forward(self, module: nn.Linear, mesh: DeviceMesh) -> nn.Linear:
        """Make `module` compute with its slices, which are plain tensors when it is called."""
        group, entry = mesh.get_group(), entry_of(module)
        wrap_forward(module, lambda states: product(module, entry.enter(states, group), module.bias), __name__)
        return module


class Rowwise(RowwiseParallel):
    """A linear layer whose inputs are cut: this rank's [..., in / ranks] → [..., out], the same on all ranks."""

    def install_forward(self, module: nn.Linear, mesh: DeviceMesh) -> nn.Linear:
        """Make `module` compute with its slice, and add its bias once."""
        group = mesh.get_group()

        def forward(states: Tensor) -> Tensor:
            make, part = exit_of(module), product(module, states, None)
            output = sum_of_ranks(part, group) if make is None else make(part)
            return output if module.bias is None else output + module.bias

        wrap_forward(module, forward, __name__)
        return module


class VocabularyEmbedding(EmbeddingParallel):
    """An embedding whose vocabulary is cut: each rank looks its own tokens up, the others are zero, all are summed."""

    def install_forward(self, module: nn.Embedding, mesh: DeviceMesh) -> nn.Embedding:
        """Make `module` compute with its slice; what else it does to an embedding, as a factor, stays."""
        shape, original = module.weight.shape, module.forward
        (rows, _), (first, _) = local_shape_and_offset(shape, mesh, [Shard(0)])
        padding = None if module.padding_idx is None else module.padding_idx - first
        module.padding_idx = padding if padding is not None and 0 <= padding < rows else None
        group = mesh.get_group()

        def forward(tokens: Tensor) -> Tensor:
            own = tokens - first
            others = (own < 0) | (own >= rows)
            found = original(own.clamp(0, rows - 1))
            return _SumOfRanks.apply(found.masked_fill(others[..., None], 0.0), group)

        wrap_forward(module, forward, __name__)
        return module


class HeadStyle(ColwiseParallel):
    """The head, cut by vocabulary. It has no forward: `dhp.parallel.tensor.loss` takes its weight."""

    def install_forward(self, module: nn.Linear, mesh: DeviceMesh) -> nn.Linear:
        """Make a call raise RuntimeError: its output would be a part of the logits."""

        def forward(_: Tensor) -> Tensor:
            raise RuntimeError("the head is cut by vocabulary; token_loss_sum takes its loss")

        wrap_forward(module, forward, __name__)
        return module


class PartOfHeads(TensorParallelLayer):
    """A module that each rank holds whole and that sees this rank's heads only, as a norm of queries: each rank has a
    part of its gradient, and they are summed once a step."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Mark the module; its forward stays."""
        setattr(module, PARTIAL_OVER, mesh.get_group())
        return module


class Whole(TensorParallelLayer):
    """A module that each rank holds whole and that sees what all ranks see, as a norm before projections that are cut:
    each rank has the whole of its gradient."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """The forward is the module's own."""
        return module


@dataclass(frozen=True)
class HeadRows:
    """A rank's rows of a projection that it holds whole: heads in a row, each of which comes out as often as `repeats`
    says."""

    rows: slice
    repeats: tuple[int, ...]

    def product(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[..., in] → [..., sum of repeats × width of a head]."""
        return self.repeated(F.linear(states, weight[self.rows], None if bias is None else bias[self.rows]))

    def repeated(self, output: Tensor) -> Tensor:
        """[…, rows] → as `product` has them."""
        if max(self.repeats) == 1:
            return output
        heads = zip(output.chunk(len(self.repeats), -1), self.repeats, strict=True)
        return torch.cat([head for head, times in heads for _ in range(times)], -1)


class SharedHeads(TensorParallelLayer):
    """A projection of attention, whole on every rank, which computes with its share of heads."""

    def __init__(self, projection: Projection):
        self.projection = projection

    def install_forward(self, module: nn.Linear, mesh: DeviceMesh) -> nn.Linear:
        """Make `module` map [..., in] to this rank's heads; of the role OUTPUT from them to [..., out]."""
        self.install(module, mesh.size(), mesh.get_local_rank(), mesh.get_group())
        setattr(module, PARTIAL_OVER, mesh.get_group())
        return module

    def install(self, module: nn.Linear, ranks: int, rank: int, group: dist.ProcessGroup | None) -> None:
        """The same. group: None where nothing is summed."""
        role, heads, kv_heads = self.projection
        own = head_range(heads, kv_heads, ranks, rank)
        first, repeats = (own.first_kv, own.repeats) if role == KEY else (own.first, (1,) * (own.end - own.first))
        width = module.in_features if role == OUTPUT else module.out_features
        width //= kv_heads if role == KEY else heads
        rows = slice(first * width, (first + len(repeats)) * width)
        if role == OUTPUT:
            setattr(module, COLUMNS, rows)
            wrap_forward(module, _computing_columns(module, rows, rank == 0, group), __name__)
        else:
            setattr(module, ROWS, HeadRows(rows, repeats))
            wrap_forward(module, _computing_rows(module, HeadRows(rows, repeats), group), __name__)


def _computing_rows(module: nn.Linear, rows: HeadRows, group: dist.ProcessGroup | None) -> Callable[[Tensor], Tensor]:
    entry = entry_of(module)

    def forward(states: Tensor) -> Tensor:
        entered = states if group is None else entry.enter(states, group)
        return rows.product(entered, module.weight, module.bias)

    return forward


def _computing_columns(
    module: nn.Linear, columns: slice, first: bool, group: dist.ProcessGroup | None
) -> Callable[[Tensor], Tensor]:
    """first: this rank's part has the bias, so that of all its gradients each rank has a part."""

    def forward(states: Tensor) -> Tensor:
        bias = None if module.bias is None else module.bias * float(first)
        part, make = F.linear(states, module.weight[:, columns], bias), exit_of(module)
        if make is not None:
            return make(part)
        return part if group is None else sum_of_ranks(part, group)

    return forward


class FusedProjections(Colwise):
    """One matrix that holds `count` side by side, each of which is cut, bias included."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Give this rank its slice of each of the fused matrices, or vectors."""
        whole = getattr(module, param, None)
        if whole is not None:
            each = StridedShard(0, split_factor=self.count)
            slices = distribute_tensor(whole, mesh, [each], src_data_rank=None)
            module.register_parameter(param, nn.Parameter(slices, whole.requires_grad))


COLWISE, ROWWISE, EMBEDDING, HEAD, PART = "dhp_colwise", "dhp_rowwise", "dhp_embedding", "dhp_head", "dhp_part_of_heads"
WHOLE = "dhp_whole"
for _name, _style in (
    (COLWISE, Colwise()),
    (ROWWISE, Rowwise()),
    (EMBEDDING, VocabularyEmbedding(shard_dim=0)),
    (HEAD, HeadStyle()),
    (PART, PartOfHeads()),
    (WHOLE, Whole()),
):
    ALL_PARALLEL_STYLES.register(_name, _style)


def is_cut_whole(block: nn.Module) -> bool:
    """Whether all that has parameters in a block is cut, or sees this rank's heads alone: siblings whose outputs are
    cut, and one module behind them whose inputs are."""
    owners = [module for module in block.modules() if any(True for _ in module.parameters(recurse=False))]
    styles = [style_of(module) for module in owners]
    return sum(map(leaves_cut, styles)) == 1 and all(style not in (None, WHOLE, EMBEDDING, HEAD) for style in styles)


def with_fused(plan: Mapping[str, str], fused: Mapping[str, int]) -> dict[str, str]:
    """A tensor plan (style by module) with the modules that are several matrices in one, by their number.

    Their styles are registered with transformers here."""
    return dict(plan) | {name: fused_style(count) for name, count in fused.items()}


def fused_style(count: int) -> str:
    """The name of the style for `count` matrices in one, registered with transformers."""
    name = f"dhp_fused_{count}"
    ALL_PARALLEL_STYLES.register(name, FusedProjections(count))
    return name


def with_shared_heads(plan: Mapping[str, str], shared: Mapping[str, Projection]) -> dict[str, str]:
    """A tensor plan with the modules `shared` in the style `SharedHeads`.

    Their styles are registered with transformers here."""
    return dict(plan) | {name: shared_heads_style(projection) for name, projection in shared.items()}


def shared_heads_style(projection: Projection) -> str:
    """The name of the style `SharedHeads`, registered with transformers."""
    name = "dhp_shared_{}_{}_{}".format(*projection)
    ALL_PARALLEL_STYLES.register(name, SharedHeads(projection))
    return name


def share_heads_without_ranks(model: nn.Module, styles: Mapping[str, str], ranks: int) -> None:
    """Let the modules of `styles`, of a model on the meta device, compute as `SharedHeads` on the first of so many
    ranks."""
    modules = dict(model.named_modules())
    for name in modules.keys() & styles.keys():  # the others are their parameters
        ALL_PARALLEL_STYLES[styles[name]].install(modules[name], ranks, 0, None)


def leaves_cut(style: str | None) -> bool:
    """Whether a module of that style takes a rank's part and gives what all ranks have."""
    return style == ROWWISE or (style is not None and style.startswith(f"dhp_shared_{OUTPUT}"))
