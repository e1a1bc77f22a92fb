"""Chooses a token from a row of logits: the likeliest, or one that is drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from dhp.base.generation import Sampling, is_greedy


class Chooser:
    """Chooses the tokens of one answer. A number between 0 and 1 is drawn for each on the host, and looked up among the
    shares of all tokens by their ids: so a seed's tokens are the same in every layout and on every device, but for
    shares that rounding moves past the number."""

    def __init__(self, sampling: Sampling):
        self._sampling = sampling
        self._draws = torch.Generator().manual_seed(sampling.seed)

    def choose(self, logits: Tensor) -> Tensor:
        """A token's id, int64 []. logits: [vocabulary]."""
        if is_greedy(self._sampling):
            return logits.argmax()
        drawn = torch.rand((), generator=self._draws, dtype=torch.float64).item()
        shares = (keep_likeliest(logits, self._sampling)).double().softmax(0).cumsum(0)
        found = torch.searchsorted(shares, shares[-1:] * drawn, right=True)[0]
        return found.clamp(max=len(shares) - 1)


def keep_likeliest(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits over the temperature, -inf where a token is not to be drawn: first top_k, then top_p of what it left, as
    transformers has them. The likeliest token is always kept."""
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(descending=True, stable=True)
        before = ordered.softmax(0).cumsum(0) - ordered.softmax(0)  # the share of all that are likelier
        dropped = (before >= sampling.top_p).index_fill(0, order.new_zeros(1), False)
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(0, order, dropped), float("-inf"))
    return logits
