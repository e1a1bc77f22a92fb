"""What every rank does alike when it evaluates."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dhp.core.draws import TokenKeys, drawing, keys_of
from dhp.engine.sample_losses import EvaluatingEngine
from dhp.models.lora import TokenDropout


class Dropping(EvaluatingEngine):
    """A rank whose stage is an adapter's dropout."""

    def __init__(self) -> None:
        self.model: Any = nn.Sequential(TokenDropout(0.5, "matrix"))
        self.forgotten: list[tuple[int, int]] = []

    def forward_step(self, micro_batch: int, chunk: int, work: Any, *received: Any) -> tuple[Any, ...]:
        return ({"rows": 1 * self.model(work)},)

    def forget(self, micro_batch: int, chunk: int) -> None:
        self.forgotten.append((micro_batch, chunk))


def test_nothing_is_left_out_at_random_and_nothing_kept() -> None:
    rank, ones = Dropping(), torch.ones(1000, requires_grad=True)
    (sent,) = rank.evaluate_step(2, 1, ones)
    assert torch.equal(sent["rows"], torch.ones(1000)) and not sent["rows"].requires_grad
    assert rank.forgotten == [(2, 1)]
    with drawing(TokenKeys(keys_of([(7, 0, 1)]))):
        (trained,) = rank.forward_step(3, 1, ones)  # training goes on as before
    assert 300 < int((trained["rows"] == 0).sum()) < 700 and trained["rows"].requires_grad
