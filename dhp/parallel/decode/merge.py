"""Attention over keys that are on several ranks, from each one's partial result (Liu et al. 2023, Ring Attention,
section 3; Flash-Decoding does the same over blocks of one device)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dhp.parallel.comm.collectives import gather_alike


def merge_over_ranks(output: Tensor, lse: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[heads, dim] of all ranks' keys, the same bits on every rank.

    output: [heads, dim] of this rank's keys, and lse: [heads], the log-sum-exp of its scores, -inf where it has no key;
    both in the exact format. One message a layer: heads × (dim + 1) numbers to each rank.
    """
    every = gather_alike(torch.cat([output, lse[:, None]], dim=1), group)  # [ranks, heads, dim + 1]
    return merge(every[..., :-1], every[..., -1])


def merge(outputs: Tensor, lses: Tensor) -> Tensor:
    """[heads, dim] from outputs [parts, heads, dim] and lses [parts, heads], summed in the order of the parts."""
    return (lses.softmax(0)[..., None] * outputs).sum(0)
