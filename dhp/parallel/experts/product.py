"""What experts make of rows that are sorted by expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations import moe

from dhp.parallel.experts.modules import DOWN, GATE_UP, takes_groups


def run_experts(experts: Any, rows: Tensor, counts: list[int]) -> Tensor:
    """The outputs of the module `experts`, whose parameters hold as many as there are `counts`: of each, how many of
    the `rows` [n, hidden] are its. Every parameter gets a gradient, zero where nobody comes, so that sums over ranks
    begin in one order on all of them."""
    gated = experts._apply_gate(_multiply(rows, getattr(experts, GATE_UP), counts))
    return _multiply(gated, getattr(experts, DOWN), counts)


def _multiply(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """rows [n, in] by the weights [experts, out, in] of each one's expert."""
    if not len(rows) or not takes_groups(weights, rows.dtype):
        parts = zip(rows.split(counts), weights.unbind(0), strict=True)
        return torch.cat([torch.nn.functional.linear(own, weight) for own, weight in parts])
    ends = torch.tensor(counts, dtype=torch.int32, device=rows.device).cumsum(0, dtype=torch.int32)
    return moe._grouped_linear(rows, weights, ends)
