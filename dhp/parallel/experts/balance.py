"""The load-balancing loss of decoders with experts (Fedus et al. 2021, "Switch Transformers", equations 4 to 6).

Of a sample, as the library has it (`load_balancing_loss_func`): with f_e the visits of an expert by token and p_e the
mean of the router's probabilities, both over the sample's tokens in all layers with experts, experts × Σ_e f_e p_e. It
is a product of two means, so of several samples together it would be another number: which ones are in a row, or on a
replica, would change what is trained. Each sample therefore has its own, as if the model ran it alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from dhp.base.errors import ModelError

_RECORDED = "router_logits"  # under this name the library's models say which modules are routers


class Routers:
    """The routers of a model, whose logits can be recorded."""

    def __init__(self, decoder: nn.Module):
        """Raises ModelError where the library does not say which modules of the decoder are routers."""
        recorder: Any = (getattr(decoder, "_can_record_outputs", None) or {}).get(_RECORDED)
        kind = getattr(recorder, "target_class", None)
        found = [module for module in decoder.modules() if kind is not None and isinstance(module, kind)]
        if not found:
            raise ModelError(
                f"{type(decoder).__name__} is to have a load-balancing loss (output_router_logits=true), and "
                "transformers does not say which of its modules are routers. Set output_router_logits to false in "
                "text_config of the model's config.json to train without it"
            )
        self._logits: list[Tensor] | None = None
        for module in found:
            module.register_forward_hook(lambda _, __, output: self._record(output[recorder.index]))

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """The logits, [tokens, experts], of each router that runs inside, in order. Layers that run again in backward
        are not recorded: their logits are those of the first run."""
        self._logits = logits = []
        try:
            yield logits
        finally:
            self._logits = None

    def _record(self, logits: Tensor) -> None:
        if self._logits is not None:
            self._logits.append(logits)


def balance_losses(logits: Sequence[Tensor], samples: Sequence[range], visits: int) -> Tensor:
    """The loss of each sample, [samples], in float32 (float64 for float64 logits).

    logits: of each layer, [tokens, experts]; samples: the tokens of each; visits: how many experts a token visits.
    """
    exact = torch.float64 if logits[0].dtype == torch.float64 else torch.float32
    probabilities = [of_layer.to(exact).softmax(-1) for of_layer in logits]
    visited = [_visited(of_layer, visits) for of_layer in probabilities]
    return torch.stack([_loss(probabilities, visited, tokens) for tokens in samples])


def sample_ranges(shape: Sequence[int], lengths: Sequence[int]) -> list[range]:
    """Where samples of so many tokens, in one row or each in its own, are among the flattened rows × tokens. shape:
    rows, tokens."""
    rows, width = shape
    starts = [0, *accumulate(lengths)][:-1] if rows == 1 else [row * width for row in range(rows)]
    return [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def _visited(probabilities: Tensor, visits: int) -> Tensor:
    """1 for each expert that a token visits, [tokens, experts]."""
    found = probabilities.detach().topk(visits, dim=-1).indices
    return torch.zeros_like(probabilities).scatter_(1, found, 1.0)


def _loss(probabilities: Sequence[Tensor], visited: Sequence[Tensor], tokens: range) -> Tensor:
    count = len(tokens) * len(probabilities)
    share, mean = (
        torch.stack([rows[tokens.start : tokens.stop].sum(0) for rows in of_layers]).sum(0) / count
        for of_layers in (visited, probabilities)
    )
    return len(mean) * (share * mean).sum()
