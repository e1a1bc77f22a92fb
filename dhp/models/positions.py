"""The range of positions that a model supports, from its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dhp.base.geometry import PositionRange

_STRETCHED = ("linear", "yarn", "llama3", "longrope")  # kinds of rotary positions with a factor that stretches them
_UNBOUNDED = "dynamic"  # turns by the row's length


def find_positions(config: Any) -> PositionRange | None:
    """The decoder's range; None where its configuration sets no bound."""
    text = config.get_text_config()
    known = getattr(text, "max_position_embeddings", None)
    rotary = list(_kinds(getattr(text, "rope_parameters", None) or {}))
    if not known or any(one.get("rope_type") == _UNBOUNDED for one in rotary):
        return None
    stretched = [
        int((one.get("original_max_position_embeddings") or known) * (one.get("factor") or 1.0))
        for one in rotary
        if one.get("rope_type") in _STRETCHED
    ]
    return PositionRange(max(known, *stretched, 0), not any("mrope_section" in one for one in rotary))


def _kinds(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Rotary parameters of all layers, or of each type of layers."""
    inner = [value for value in parameters.values() if isinstance(value, Mapping)]
    if not inner:
        yield parameters
    for one in inner:
        yield from _kinds(one)
