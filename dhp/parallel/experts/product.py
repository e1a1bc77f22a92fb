"""The experts' outputs for rows that are sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.integrations import moe

from dhp.parallel.experts.modules import DOWN, GATE_UP, takes_groups


@dataclass(frozen=True)
class Groups:
    """The rows of each expert, of rows sorted by expert. counts: rows of each expert. ends: where its rows end, int32
    [experts], on the device, so that nothing has to be copied there."""

    counts: list[int]
    ends: Tensor


def run_experts(experts: Any, rows: Tensor, groups: Groups) -> Tensor:
    """The outputs of the module `experts` for rows [n, hidden], sorted by its experts, of which there are as many as
    `groups`. Every parameter gets a gradient, zero without rows, so that sums over ranks begin in one order on
    all of them."""
    gated = experts._apply_gate(_multiply(rows, getattr(experts, GATE_UP), groups))
    return _multiply(gated, getattr(experts, DOWN), groups)


def _multiply(rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """rows [n, in] by the weights [experts, out, in] of each one's expert."""
    if not len(rows) or not takes_groups(weights, rows.dtype):
        parts = zip(rows.split(groups.counts), weights.unbind(0), strict=True)
        return torch.cat([torch.nn.functional.linear(own, weight) for own, weight in parts])
    return moe._grouped_linear(rows, weights, groups.ends)
