"""Escapes untrusted text of data or models for display: it may hold terminal control sequences."""

from __future__ import annotations

import re

# What would steer a terminal, turn the direction of text, or cannot be written.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """Text with control characters escaped, except line ends and tabs."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """As `harmless`, with line ends escaped as well: the text cannot fake another line."""
    return harmless(text).replace("\n", "\\n").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
