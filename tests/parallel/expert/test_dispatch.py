"""Rows of tokens to the ranks of their experts and back, against all experts in one process."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhp.parallel.expert import expert_shares
from dhp.parallel.expert.expert_modules import Groups
from dhp.parallel.expert.expert_shares import count_visits, find_visits, inverse, visit
from dhp.parallel.recompute.recomputed_layers import RecomputedLayers
from tests.helpers.ranks import run_on_ranks

EXPERTS, HIDDEN, VISITS = 6, 5, 2
TOKENS = (7, 0, 4)  # of each rank


def _visits(rank: int, only: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """States, experts and weights of a rank's tokens. only: all go to this one and the next."""
    generator = torch.Generator().manual_seed(rank)
    states = torch.randn(TOKENS[rank], HIDDEN, generator=generator, dtype=torch.float64)
    scores = torch.rand(TOKENS[rank], EXPERTS, generator=generator, dtype=torch.float64)
    if only is not None:
        scores[:, only] += 9
        scores[:, only + 1] += 8
    weights, visited = scores.topk(VISITS)
    return states.requires_grad_(), visited, weights.requires_grad_()


def _matrices() -> Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)


def _by_ranks(only: int | None) -> tuple[Tensor, ...]:
    """The output of a rank's tokens, and gradients of its states, weights and experts."""
    rank, own = dist.get_rank(), EXPERTS // dist.get_world_size()
    states, visited, weights = _visits(rank, only)
    held = _matrices()[rank * own : (rank + 1) * own].requires_grad_()

    def compute(rows: Tensor, groups: Groups) -> Tensor:
        assert groups.ends.tolist() == [*accumulate(groups.counts)]
        return torch.cat([part.sin() @ w for part, w in zip(rows.split(groups.counts), held.unbind(0), strict=True)])

    output = visit(states, visited, weights, own, dist.group.WORLD, compute)
    (output.cos() * (1 + rank)).sum().backward()
    return output.detach(), states.grad, weights.grad, held.grad


def _in_one(only: int | None) -> tuple[list[tuple[Tensor, ...]], Tensor]:
    matrices, found = _matrices().requires_grad_(), []
    for rank in range(len(TOKENS)):
        states, visited, weights = _visits(rank, only)
        output = torch.einsum("th,tvho,tv->to", states.sin(), matrices[visited], weights)
        (output.cos() * (1 + rank)).sum().backward()
        found.append((output.detach(), states.grad, weights.grad))
    return found, matrices.grad


def _check(only: int | None) -> None:
    wanted, of_experts = _in_one(only)
    own = EXPERTS // len(TOKENS)
    for rank, (*found, held) in enumerate(run_on_ranks(_by_ranks, len(TOKENS), only)):
        for mine, theirs in zip(found, wanted[rank], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(held, of_experts[rank * own : (rank + 1) * own], rtol=1e-12, atol=1e-12)


def test_tokens_come_back_with_what_their_experts_say() -> None:
    """One of the ranks has no token."""
    _check(None)


def test_experts_that_nobody_visits_get_a_zero_gradient() -> None:
    _check(2)


def _visits_by_hand() -> tuple[list[int], list[int], list[int], list[int]]:
    rank = dist.get_rank()
    visited = torch.tensor([[[3, 0], [1, 2]], [[0, 3], [0, 1], [2, 3]]][rank])
    visits = find_visits(visited, 2, dist.group.WORLD)
    return visits.order.tolist(), visits.send, visits.receive, visits.groups.counts


def test_visits_by_hand() -> None:
    first, second = run_on_ranks(_visits_by_hand, 2)
    # Pairs of the first rank, by expert: 0 is number 1, 1 is number 2, 2 is number 3, 3 is number 0.
    assert first == ([1, 2, 3, 0], [2, 2], [2, 3], [3, 2])
    assert second == ([0, 2, 3, 4, 1, 5], [3, 3], [2, 3], [2, 3])


def test_an_order_and_its_inverse() -> None:
    order = torch.tensor([2, 0, 3, 1])
    assert order[inverse(order)].tolist() == [0, 1, 2, 3]


class _Layer(nn.Module):
    def forward(self, states: Tensor, visited: Tensor, weights: Tensor) -> Tensor:
        return visit(states, visited, weights, EXPERTS // 3, dist.group.WORLD, lambda rows, groups: rows.sin())


def _sizes_exchanged(choice: str) -> tuple[int, Tensor]:
    """How often ranks exchange sizes in a layer's forward and backward, and the gradient of its states."""
    layer, (states, visited, weights) = _Layer(), _visits(dist.get_rank(), None)
    RecomputedLayers([layer], SimpleNamespace(projections=(), mlp=()), (choice,))
    with mock.patch.object(expert_shares, "exchange_rows", wraps=expert_shares.exchange_rows) as exchanged:
        layer(states, visited, weights).cos().sum().backward()
    return exchanged.call_count, states.grad


@pytest.mark.parametrize("choice", ["linear", "all"])
def test_a_recomputed_layer_keeps_who_visits_whom(choice: str) -> None:
    """The rows go and come again; how many do is neither exchanged nor waited for again."""
    once = run_on_ranks(_sizes_exchanged, 3, "none")
    again = run_on_ranks(_sizes_exchanged, 3, choice)
    assert [count for count, _ in [*once, *again]] == [1] * 6
    for (_, gradient), (_, wanted) in zip(again, once, strict=True):
        assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("pairs", [[3, 0, 3, 1, 3], []])
def test_visits_are_counted_where_the_pairs_are(pairs: list[int]) -> None:
    counted = count_visits(torch.tensor(pairs, dtype=torch.long), 5)
    assert counted.tolist() == [pairs.count(number) for number in range(5)]
    assert counted.dtype == torch.int64
