"""Tokens are chosen among those that transformers would draw from, with its shares, and by the seed alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dhp.core.batch import Sampling
from dhp.parallel.attention.row_decode import Chooser, keep_likeliest

LOGITS = torch.randn(50, generator=torch.Generator().manual_seed(2)) * 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 60])
@pytest.mark.parametrize("top_p", [0.01, 0.6, 1.0])
def test_what_is_kept_is_what_transformers_keeps(temperature: float, top_k: int, top_p: float) -> None:
    warpers = [TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    wanted = LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.long), LOGITS[None].clone())[0]
    found = keep_likeliest(LOGITS, Sampling(1, temperature=temperature, top_p=top_p, top_k=top_k))
    torch.testing.assert_close(found, wanted)


def test_tokens_come_as_often_as_their_shares_say() -> None:
    sampling = Sampling(1, temperature=1.3, top_k=5, seed=4)
    chooser, count = Chooser(sampling), 20_000
    found = Counter(int(chooser.choose(LOGITS)) for _ in range(count))
    shares = keep_likeliest(LOGITS, sampling).softmax(0)
    assert set(found) == set(shares.nonzero()[:, 0].tolist())
    assert all(abs(found[token] / count - float(shares[token])) < 0.015 for token in found)


def test_a_seed_says_the_draws() -> None:
    draw = lambda seed: [
        int(chooser.choose(LOGITS)) for chooser in [Chooser(Sampling(9, temperature=2.0, seed=seed))] * 9
    ]
    assert draw(1) == draw(1) != draw(2)
    assert int(Chooser(Sampling(1)).choose(LOGITS)) == int(LOGITS.argmax())
