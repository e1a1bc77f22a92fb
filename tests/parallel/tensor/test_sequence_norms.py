"""Shares of states: what fills them up, what is kept of gathered ones."""

from __future__ import annotations

import time
import weakref

import torch
from torch import Tensor, nn

from dhp.parallel.recompute.recomputed_layers import tile_mlps
from dhp.parallel.recompute.saved_tensors import SavedTensors
from dhp.parallel.tensor.sequence_norms import SequenceNorms, TensorRanks, gather, keeping_shares
from tests.helpers.ranks import run_on_ranks

TOKENS, WIDTH = 7, 4


def _shares() -> tuple[Tensor, Tensor, Tensor]:
    ranks, rank = TensorRanks(2, torch.distributed.group.WORLD), torch.distributed.get_rank()
    states = torch.arange(float(TOKENS * WIDTH)).view(TOKENS, WIDTH)
    own = ranks.own(states)
    return own, ranks.gather(own, TOKENS), ranks.sum(states * (rank + 1))


def test_shares_are_filled_up_and_gathered_without_what_filled_them() -> None:
    states = torch.arange(float(TOKENS * WIDTH)).view(TOKENS, WIDTH)
    filled = torch.cat([states, torch.zeros(1, WIDTH)])
    for rank, (own, whole, summed) in enumerate(run_on_ranks(_shares, 2)):
        mine = filled[4 * rank : 4 * rank + 4]
        assert torch.equal(own, mine) and torch.equal(summed, 3 * mine) and torch.equal(whole, states)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.router = nn.Sequential(nn.Linear(WIDTH, WIDTH))

    def forward(self, states: Tensor) -> Tensor:
        return states + self.router(self.norm(states))


def _kept() -> tuple[int, int, Tensor, Tensor]:
    torch.manual_seed(0)
    layer, states = _Layer(), torch.randn(1, 64, WIDTH)
    plain = layer(states)
    counted = SavedTensors(layer)
    with counted.counting():
        whole = layer(states)
    before = counted.bytes
    del whole
    norms = SequenceNorms(TensorRanks(2, torch.distributed.group.WORLD))
    norms.install([layer])
    norms.begin_at(layer)
    norms.end_at(layer, False)
    held = counted.bytes
    with counted.counting():
        output = layer(states)
    kept = counted.bytes - held
    output.sum().backward()
    return before, kept, plain.detach(), output.detach()


def test_a_block_that_is_not_cut_is_given_whole_states_and_keeps_its_share_of_them() -> None:
    for before, kept, plain, output in run_on_ranks(_kept, 2):
        assert torch.allclose(plain, output)
        assert kept < 0.6 * before


class _Tiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())

    def forward(self, states: Tensor) -> Tensor:
        return states + self.mlp(self.norm(states))


def _in_flight(chunks: int) -> tuple[Tensor, int]:
    """The gradient of one micro-batch's input, while one of other rows is on its way; and what was gathered."""
    torch.manual_seed(0)
    layer, gathered = _Tiled(), 0
    norms = SequenceNorms(TensorRanks(2, torch.distributed.group.WORLD))
    norms.install([layer])
    norms.begin_at(layer)
    norms.end_at(layer, False)
    if chunks > 1:
        tile_mlps([layer], ["mlp.0"], chunks)
    one, other = torch.randn(1, 24, WIDTH, requires_grad=True), torch.randn(2, 4, WIDTH)

    def counted(self: TensorRanks, share: Tensor, tokens: int) -> Tensor:
        nonlocal gathered
        gathered += tokens
        return original(self, share, tokens)

    original, TensorRanks.gather = TensorRanks.gather, counted  # type: ignore[method-assign]
    try:
        output = layer(one)
        layer(other)
        output.sum().backward()
    finally:
        TensorRanks.gather = original  # type: ignore[method-assign]
    return one.grad, gathered


def test_chunks_of_tokens_go_back_whatever_rows_came_in_between() -> None:
    """A chunk has as many tokens here as the other rows; and it is gathered no more often than a whole block."""
    whole, chunks = run_on_ranks(_in_flight, 2, 1)[0], run_on_ranks(_in_flight, 2, 3)[0]
    assert torch.allclose(whole[0], chunks[0])
    assert chunks[1] == whole[1]


def _alive() -> bool:
    """Whether a share lives after a block whose frozen matrix keeps no states."""
    share = torch.randn(1, 4, WIDTH, requires_grad=True) + 1.0
    ranks, memory = TensorRanks(2, torch.distributed.group.WORLD), weakref.ref(share.untyped_storage())
    matrix = torch.randn(WIDTH, WIDTH)
    full = gather(share, (8,), ranks, False)
    with keeping_shares(full, share, ranks):
        output = (full @ matrix).sigmoid()
    del share, full
    deadline = time.monotonic() + 10
    while memory() is not None and time.monotonic() < deadline:  # gloo's thread lets go of it a moment later
        time.sleep(0.01)
    return memory() is not None and output is not None


def test_a_share_that_nothing_keeps_is_freed() -> None:
    assert run_on_ranks(_alive, 2) == [False, False]
