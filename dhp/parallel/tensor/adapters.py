"""Adapters of matrices that are cut over tensor ranks: each is cut so that its part of the output is this rank's.

Beside a matrix whose outputs are cut (Megatron's column parallelism), B is cut with them, and A is whole on every rank:
it sees what all ranks see, and its gradient, of which each rank has the part that its rows of B give, is summed once a
step. Beside one whose inputs are cut (row parallelism), A is cut with them, what it makes is summed over the ranks, a
few numbers a token, and B is whole. So the ranks exchange no more of a layer's width than without adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from dhp.base.adapters import ADAPTER
from dhp.parallel.tensor.local_shards import Cut, cut_of, mark
from dhp.parallel.tensor.styles import PARTIAL_OVER, ROWS, Entry, entry_of, sum_of_ranks


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
        rows = base.__dict__.get(ROWS)
        if rows is not None:
            _compute_rows(out, rows)
            setattr(out, PARTIAL_OVER, group)
            _enter(layer, base, into, group)
        elif cut is None or all(placement.is_replicate() for placement in cut.placements):
            continue  # whole on every rank
        elif cut.placements[0].dim == 0:
            _take_slice(out, mesh, cut.placements[0])
            _enter(layer, base, into, group)
        else:
            _take_slice(into, mesh, Shard(1))
            _sum_output(into, group)


def _enter(layer: Any, base: nn.Module, into: nn.Linear, group: dist.ProcessGroup) -> None:
    entry = entry_of(base)
    entry.join()
    layer.lora_dropout[ADAPTER] = _Entering(layer.lora_dropout[ADAPTER], entry, group)
    setattr(into, PARTIAL_OVER, group)


def _take_slice(module: nn.Linear, mesh: DeviceMesh, placement: Placement) -> None:
    whole = module.weight
    local = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None).to_local()
    module.weight = nn.Parameter(local.contiguous(), whole.requires_grad)
    mark(module, "weight", Cut(mesh, (placement,), whole.shape))


def _sum_output(module: nn.Linear, group: dist.ProcessGroup) -> None:
    module.forward = lambda states: sum_of_ranks(F.linear(states, module.weight), group)


def _compute_rows(module: nn.Linear, rows: slice) -> None:
    module.forward = lambda states: F.linear(states, module.weight[rows])
