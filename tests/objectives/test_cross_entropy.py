"""Cross-entropy on hand-made numbers."""

from __future__ import annotations

import torch
from torch import nn

from dhp.objectives.objective import CrossEntropy, Head, find_targets

torch.manual_seed(0)
HEAD = nn.Linear(4, 7, bias=False)
HIDDEN = torch.randn(2, 5, 4)


def test_sum_over_targets_divided_by_the_global_count() -> None:
    targets = torch.tensor([[-100, 3, 1, -100, -100], [6, -100, -100, -100, -100]])
    logp = HEAD(HIDDEN).log_softmax(-1)
    expected = -(logp[0, 1, 3] + logp[0, 2, 1] + logp[1, 0, 6]) / 11
    torch.testing.assert_close(
        CrossEntropy().share(Head(HEAD), HIDDEN.flatten(0, 1), find_targets(targets), 11), expected
    )


def test_rows_without_target_give_zero_and_zero_gradients() -> None:
    hidden = HIDDEN.clone().requires_grad_()
    head = nn.Linear(4, 7, bias=False)
    CrossEntropy().share(Head(head), hidden.flatten(0, 1), find_targets(torch.full((2, 5), -100)), 3).backward()
    assert not hidden.grad.any() and not head.weight.grad.any()


def test_targets_stand_at_the_position_that_predicts_them() -> None:
    positions, tokens = find_targets(torch.tensor([[-100, 3, 1, -100, -100], [6, -100, -100, 0, -100]]))
    assert positions.tolist() == [1, 2, 5, 8]
    assert tokens.tolist() == [3, 1, 6, 0]
