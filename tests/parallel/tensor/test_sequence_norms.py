"""Shares of states: what fills them up, what is kept of gathered ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dhp.parallel.recompute.saved_tensors import SavedTensors
from dhp.parallel.tensor.sequence_norms import SequenceNorms
from dhp.parallel.tensor.sequence_shares import TensorRanks
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
