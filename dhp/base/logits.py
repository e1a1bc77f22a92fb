"""How logits are computed from the head's output, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LogitRule:
    """A logit is softcap × tanh(factor × output / softcap); without a soft cap, factor × output.

    Gemma Team 2024, "Gemma 2", section 2; Granite and Cohere have factors.
    """

    factor: float = 1.0
    softcap: float | None = None
