"""Adapters of matrices whose inputs are cut drop what they drop beside the whole matrix."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dhp.core.draws import TokenKeys, drawing, keys_of
from dhp.core.parameters import ADAPTER, AdapterSettings
from dhp.models.lora import adapted_modules, add_adapters
from dhp.parallel.tensor.slices import cut_adapters, use_local_slices
from tests.parallel.conftest import RunOnRanks

TOKENS = 50


def _adapted(width: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(width, 3, bias=False))
    add_adapters(model, ["0"], AdapterSettings(2, 4.0, dropout=0.5), 0)
    return model


def _dropped(model: nn.Module, columns: int) -> Tensor:
    """Where ones of so many columns are dropped: bool [TOKENS, columns]."""
    ((_, layer),) = adapted_modules(model)
    with drawing(TokenKeys(keys_of([(5, 0, TOKENS)]))):
        return layer.lora_dropout[ADAPTER](torch.ones(TOKENS, columns)) == 0


def _dropped_by_slice(width: int) -> tuple[Tensor, Tensor]:
    """Of this rank's columns, those of its slice of A."""
    model, mesh = _adapted(width), init_device_mesh("cpu", (dist.get_world_size(),))
    ((_, layer),) = adapted_modules(model)
    cut = distribute_tensor(layer.base_layer.weight.detach(), mesh, [Shard(1)])
    layer.base_layer.weight = nn.Parameter(cut)
    use_local_slices(model)
    cut_adapters(adapted_modules(model), mesh)
    weight = layer.lora_A[ADAPTER].weight.detach()
    return _dropped(model, weight.shape[1]), weight


@pytest.mark.parametrize(("width", "widths"), [(12, [4, 4, 4]), (11, [4, 4, 3]), (10, [4, 4, 2])])
def test_slices_of_any_width_drop_what_the_whole_matrix_drops(
    width: int, widths: list[int], on_ranks: RunOnRanks
) -> None:
    """DTensor's slices are equal only where the ranks divide the width."""
    found = on_ranks(_dropped_by_slice, 3, width)
    assert [dropped.shape[1] for dropped, _ in found] == widths
    whole = _adapted(width)
    assert torch.equal(torch.cat([dropped for dropped, _ in found], dim=1), _dropped(whole, width))
    ((_, layer),) = adapted_modules(whole)
    assert torch.equal(torch.cat([weight for _, weight in found], dim=1), layer.lora_A[ADAPTER].weight)
