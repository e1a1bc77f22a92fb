"""What is declared of families beside their contract: one line each, where a small model cannot tell."""

from __future__ import annotations

from typing import Any

# How tokens of an image see each other both ways (dhp.parallel.attention.visibility.BlockRule).
_BLOCKS = {"gemma3": "bounded", "shieldgemma2": "bounded", "gemma4": "windowed", "gemma4_unified": "windowed"}


def block_rule(config: Any) -> str | None:
    """The rule of a family's blocks; None where tokens of an image see each other as any others do."""
    rule = _BLOCKS.get(config.model_type)
    if rule == "windowed" and getattr(config.get_text_config(), "use_bidirectional_attention", None) != "vision":
        return None
    return rule
