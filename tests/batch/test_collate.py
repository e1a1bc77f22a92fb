"""Which tokens see each other both ways."""

from __future__ import annotations

import torch

from dhp.batch.collate import find_prefixes


def test_a_prefix_ends_before_the_first_token_that_is_learned() -> None:
    """The token that predicts the first of an answer is the last before it. A sample without answers is all prefix."""
    targets = torch.tensor([-100, -100, 7, 8, -100, 9, -100, -100, -100, 5, -100])
    found = find_prefixes(targets, [6, 2, 3])
    assert found.tolist() == [True, True, True, False, False, False, True, True, True, True, False]
