"""All-to-all with uneven splits and its gradient; sums."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dhp.parallel.collectives import AllToAll, sum_in_place
from tests.helpers.ranks import run_on_ranks

SEND = ((1, 0, 2), (3, 1, 0), (0, 2, 2))  # SEND[from][to] rows


def _exchange() -> tuple[Tensor, Tensor]:
    rank = dist.get_rank()
    rows = (100.0 * rank + torch.arange(sum(SEND[rank]), dtype=torch.float64))[:, None].requires_grad_()
    receive = [SEND[other][rank] for other in range(3)]
    got = AllToAll.apply(rows, SEND[rank], receive, dist.group.WORLD)
    (got * got).sum().backward()  # the gradient of each row must come home: 2 × its value
    return got.detach().flatten(), (rows.grad - 2 * rows.detach()).flatten()


def test_rows_arrive_by_rank_and_gradients_go_home() -> None:
    results = run_on_ranks(_exchange, 3)
    assert [got.tolist() for got, _ in results] == [[0, 100, 101, 102], [103, 200, 201], [1, 2, 202, 203]]
    assert all(not error.any() for _, error in results)


def _sum() -> Tensor:
    return sum_in_place(torch.tensor([1.0, 2.0]) * (dist.get_rank() + 1), dist.group.WORLD)


def test_sum_in_place() -> None:
    assert [t.tolist() for t in run_on_ranks(_sum, 2)] == [[3.0, 6.0], [3.0, 6.0]]
