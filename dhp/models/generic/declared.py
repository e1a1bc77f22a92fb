"""Properties of families that their small model cannot show, declared one line each."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# How tokens of an image see each other both ways (dhp.parallel.attention.visibility.BlockRule).
_BLOCKS = {
    "gemma3": "bounded",
    "shieldgemma2": "bounded",
    "gemma4": "windowed",
    "gemma4_unified": "windowed",
    "paligemma": "free",
}
# Families in which all tokens before an answer see each other (Beyer et al. 2024, PaliGemma, section 3).
_PREFIX = frozenset({"paligemma"})
# Families whose MLPs take as an argument which of all tokens are an image's, and route these otherwise.
_MLPS_WITH_KINDS = frozenset({"ernie4_5_vl_moe"})
# Families whose every layout is in the tests' matrix, besides those with an adapter of their own.
_DECLARED = frozenset({
    "aya_vision", "cohere2_vision", "ernie4_5_vl_moe", "gemma3", "gemma4", "idefics3", "internvl", "llava",
    "llava_next", "llava_onevision", "minicpmv4_6", "mistral3", "ovis2", "paligemma", "smolvlm",
})  # fmt: skip


def is_declared(config: Any) -> bool:
    """Whether tests compare the family with the plain model."""
    return config.model_type in _DECLARED


def block_rule(config: Any) -> str | None:
    """The rule of a family's blocks; None where tokens of an image see each other as any others do."""
    rule = _BLOCKS.get(config.model_type)
    if rule == "windowed" and getattr(config.get_text_config(), "use_bidirectional_attention", None) != "vision":
        return None
    return rule


def sees_prefix(config: Any) -> bool:
    """Whether all tokens before the first one to be learned see each other."""
    return config.model_type in _PREFIX


def mlps_need_rows(config: Any) -> bool:
    """Whether an MLP computes all tokens at once or none."""
    return config.model_type in _MLPS_WITH_KINDS


def token_types(config: Any, kinds: Tensor, labels: Tensor) -> Tensor:
    """The plain model's type of each token of one sample, [1, tokens]: its kind, or, where a prefix is seen both ways,
    whether it is behind that."""
    if not sees_prefix(config):
        return kinds
    return (labels != -100).long().cumsum(-1).clamp(max=1)


def first_position(config: Any) -> int:
    """Where a family begins to count the tokens of a row."""
    return 1 if config.model_type == "paligemma" else 0
