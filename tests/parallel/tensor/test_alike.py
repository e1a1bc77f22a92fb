"""Tensor ranks hold the same of what none of them cuts, or no checkpoint is written."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dhp.core.errors import PartFailed
from dhp.parallel.tensor.slices import mark_cut
from dhp.parallel.tensor.tensor_plan import hash_bits, require_alike
from tests.helpers.ranks import run_on_ranks


def _compared(off_by: float, dtype: torch.dtype) -> str:
    """What rank 1, whose norm is off at one place, and rank 0 say. Their slices of the cut weight differ anyway."""
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    model = nn.ModuleDict({"norm": nn.LayerNorm(8), "cut": nn.Linear(4, 4, bias=False)}).to(dtype)
    nn.init.constant_(model["cut"].weight, float(rank))
    mark_cut(model["cut"], "weight", mesh, 0)
    with torch.no_grad():
        model["norm"].weight[3] += off_by * rank
    try:
        require_alike(model, mesh.get_group())
    except PartFailed as failed:
        return str(failed)
    return "alike"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_ranks_that_hold_the_same_are_alike(dtype: torch.dtype) -> None:
    assert run_on_ranks(_compared, 2, 0.0, dtype) == ["alike", "alike"]


def test_a_single_bit_is_seen_and_named_on_every_rank() -> None:
    for said in run_on_ranks(_compared, 2, torch.finfo(torch.float32).eps, torch.float32):
        assert said.startswith("tensor ranks no longer hold the same norm.weight: ")


def test_a_hash_depends_on_values_and_places() -> None:
    values = torch.arange(5.0)
    same = [hash_bits(values), hash_bits(values.clone())]
    others = [values.flip(0), values.neg(), torch.arange(6.0), values.double(), torch.tensor([0.0, 1, 2, 4, 3])]
    assert same[0] == same[1] and same[0] not in [hash_bits(other) for other in others]


def test_the_sign_of_any_place_counts() -> None:
    values = torch.arange(1.0, 6.0, dtype=torch.float64)
    for place in range(5):
        other = values.clone()
        other[place] *= -1
        assert hash_bits(other) != hash_bits(values)


def test_long_tensors_are_hashed_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = hash_bits(values)
    monkeypatch.setattr("dhp.parallel.tensor.tensor_plan._CHUNK", 7)
    assert hash_bits(values) == whole
