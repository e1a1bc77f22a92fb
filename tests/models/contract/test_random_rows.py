"""Which tokens see each other both ways."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from dhp.models.contract.random_rows import find_prefixes, token_types


def test_a_prefix_ends_before_the_first_token_that_is_learned() -> None:
    """The token that predicts the first of an answer is the last before it. A sample without answers is all prefix."""
    targets = torch.tensor([-100, -100, 7, 8, -100, 9, -100, -100, -100, 5, -100])
    found = find_prefixes(targets, [6, 2, 3])
    assert found.tolist() == [True, True, True, False, False, False, True, True, True, True, False]


def test_the_plain_models_prefix_is_the_same() -> None:
    """Also where a label is the sample's first token, which nothing predicts."""
    config, targets = SimpleNamespace(model_type="paligemma"), torch.tensor([-100, -100, 7, -100, 9, -100])
    for first in (-100, 5):
        types = token_types(config, torch.zeros(1, 6), torch.cat([torch.tensor([first]), targets[:-1]])[None])
        assert types.tolist() == [[0, 0, 0, 1, 1, 1]]
        assert (types[0] == 0).tolist() == find_prefixes(targets, [6]).tolist()
