"""Narrows the type of a value that may be null in the schema, but is set in a resolved configuration."""

from __future__ import annotations

from typing import TypeVar

Value = TypeVar("Value")


def resolved(value: Value | None) -> Value:
    """The value. Raises ValueError for one that `dhp.config.resolve` has not filled in."""
    if value is None:
        raise ValueError("the configuration was not resolved: dhp.config.resolve.resolve fills in what is unset")
    return value
