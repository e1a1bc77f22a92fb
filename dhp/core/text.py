"""Text for people: aligned tables, numbers, untrusted text with control characters escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """A line a row, columns as wide as their widest cell: the first `left` of them flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_padded(row, widths, left)).rstrip() for row in rows]


def _padded(row: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    cells = enumerate(zip(row, widths, strict=True))
    return [cell.ljust(width) if at < left else cell.rjust(width) for at, (cell, width) in cells]


def json_safe(value: Any) -> Any:
    """The value with every number that JSON has no word for as "NaN", "Infinity" or "-Infinity".

    Those are the strings of protobuf's JSON mapping: null keeps its meaning of "not known".
    """
    if isinstance(value, Mapping):
        return {key: json_safe(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return [json_safe(inner) for inner in value] if isinstance(value, list | tuple) else value


def from_json(value: Any) -> Any:
    """The inverse of `json_safe`. Other text stays text."""
    if isinstance(value, dict):
        return {key: from_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [from_json(inner) for inner in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def shown(value: float | None, spec: str) -> str:
    """The number in that format, or `-` when it is not known."""
    return "-" if value is None else format(value, spec)


# What would steer a terminal, turn the direction of text, or cannot be written.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """Text with control characters escaped, except line ends and tabs."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """As `harmless`, with line ends escaped as well: the text cannot fake another line."""
    return harmless(text).replace("\n", "\\n").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
