"""Numbers as JSON and people read them."""

import math
from collections.abc import Mapping
from typing import Any


def json_safe(value: Any) -> Any:
    """The value with every number that JSON has no word for as "NaN", "Infinity" or "-Infinity".

    Those are the strings of protobuf's JSON mapping: null keeps its meaning of "not known".
    """
    if isinstance(value, Mapping):
        return {key: json_safe(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def from_json(value: Any) -> Any:
    """The inverse of `json_safe`, for values that hold no other text."""
    if isinstance(value, dict):
        return {key: from_json(inner) for key, inner in value.items()}
    return float(value) if isinstance(value, str) else value


def shown(value: float | None, spec: str) -> str:
    """The number in that format, or `-` when it is not known."""
    return "-" if value is None else format(value, spec)
