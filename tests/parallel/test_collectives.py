"""All-to-all with uneven splits and its gradient; sums."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dhp.parallel import comm
from dhp.parallel.comm import AllToAll, Shift, largest_in_place, sum_in_place
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


class _Backend:
    """A backend with an all-to-all of its own, as NCCL has: gloo's, under another name."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, list[int], list[int]]] = []
        self._exchange = dist.all_to_all_single

    def all_to_all_single(
        self, target: Tensor, source: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup
    ) -> None:
        self.calls.append((len(target), len(source), receive, send))
        self._exchange(target, source, receive, send, group=group)


def _exchange_by_the_backend() -> tuple[Tensor, Tensor, list]:
    backend = _Backend()
    dist.get_backend, dist.all_to_all_single = lambda _=None: "nccl", backend.all_to_all_single
    return *_exchange(), backend.calls


def test_a_backend_with_its_own_all_to_all_is_told_what_goes_and_what_comes() -> None:
    results = run_on_ranks(_exchange_by_the_backend, 3)
    assert [got.tolist() for got, *_ in results] == [[0, 100, 101, 102], [103, 200, 201], [1, 2, 202, 203]]
    assert all(not error.any() for _, error, _ in results)
    for rank, (*_, calls) in enumerate(results):
        send, receive = list(SEND[rank]), [of_rank[rank] for of_rank in SEND]
        there, back = (sum(receive), sum(send), receive, send), (sum(send), sum(receive), send, receive)
        assert calls == [there, back]


def _shift() -> tuple[Tensor, Tensor]:
    rank = dist.get_rank()
    own = torch.arange(2.0 * (rank + 1)).view(rank + 1, 2) + 100 * rank
    before = (rank - 1) % 3
    return Shift(own, (before + 1, 2), dist.group.WORLD).wait(), own


def test_a_ring_sends_to_the_next_and_receives_from_the_one_before() -> None:
    results = run_on_ranks(_shift, 3)
    for rank, (got, _) in enumerate(results):
        assert torch.equal(got, results[rank - 1][1])


def _largest() -> Tensor:
    return largest_in_place(torch.tensor([1.0, -2.0]) * (dist.get_rank() + 1), dist.group.WORLD)


def test_largest_in_place() -> None:
    assert [t.tolist() for t in run_on_ranks(_largest, 2)] == [[2.0, -2.0]] * 2


def _staged() -> list[Tensor]:
    comm._must_stage = lambda *_: True  # as where ranks share a GPU
    work = comm.begin_sum(total := torch.tensor([1.0, 2.0]) * (dist.get_rank() + 1), dist.group.WORLD)
    assert work is None
    return [total, _largest(), *_exchange()]


def test_what_is_staged_is_the_same() -> None:
    first, second, third = run_on_ranks(_staged, 3)
    for total, largest, _, error in (first, second, third):
        assert total.tolist() == [6.0, 12.0] and largest.tolist() == [3.0, -2.0] and not error.any()
    assert second[2].tolist() == [103, 200, 201]


def _sum() -> Tensor:
    return sum_in_place(torch.tensor([1.0, 2.0]) * (dist.get_rank() + 1), dist.group.WORLD)


def test_sum_in_place() -> None:
    assert [t.tolist() for t in run_on_ranks(_sum, 2)] == [[3.0, 6.0], [3.0, 6.0]]
