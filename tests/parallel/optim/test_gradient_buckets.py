"""Which gradients share a message, and in which order the messages go."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dhp.parallel.optim import replicated
from dhp.parallel.optim.replicated import Gradients, _cut_into_buckets
from tests.helpers.ranks import run_on_ranks


def test_a_bucket_has_one_kind_of_sum_and_comes_where_its_last_member_does(monkeypatch: Any) -> None:
    monkeypatch.setattr(replicated, "BUCKET_BYTES", 12)  # three values
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(9)]
    over: Any = "tensor ranks"
    copies: Any = "ranks with the same experts"
    partial = {id(parameters[8]): over}
    others = {id(parameters[number]): copies for number in (1, 4, 5, 7)}
    buckets, bucket_of = _cut_into_buckets(parameters, torch.float32, partial, others)
    # Backward comes by from the last one on; what is summed over further ranks waits for all others.
    assert [bucket.members for bucket in buckets] == [[7, 5, 4], [6, 3, 2], [1], [0], [8]]
    assert [bucket.group for bucket in buckets] == [copies, None, copies, None, None]
    assert [bucket.over for bucket in buckets] == [None, None, None, None, over]
    assert bucket_of == {7: 0, 5: 0, 4: 0, 6: 1, 3: 1, 2: 1, 1: 2, 0: 3, 8: 4}
    ends = {id(parameters[number]): copies for number in (0, 4)}  # a bucket that begins first and is full last
    buckets, _ = _cut_into_buckets(parameters[:5], torch.float32, {}, ends)
    assert [bucket.members for bucket in buckets] == [[3, 2, 1], [4, 0]]


def _sums() -> list[list[float]]:
    """Gradients of two micro-batches on each of two ranks, of a weight of both, of one of them, and of none."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    first, second, _ = parameters
    held = Gradients(parameters, torch.float32, dist.group.WORLD, {})
    found = []
    for _ in range(2):  # memory that was freed in between may hold anything
        held.backward((first * (dist.get_rank() + 1)).sum(), last=False)
        held.backward((first * 3 + second * 5).sum(), last=True)
        found.append([gradient.sum().item() for gradient in held.local()])
        for gradient in held.local():
            gradient.fill_(float("nan"))
        held.drop()
    return found


def test_a_sum_begins_with_the_first_gradient_and_is_zero_where_none_came() -> None:
    assert run_on_ranks(_sums, 2) == [[[18.0, 20.0, 0.0]] * 2] * 2
