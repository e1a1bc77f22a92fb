"""A value that a resolved configuration has, whatever the schema says of what a user may leave out."""

from __future__ import annotations

from typing import TypeVar

Value = TypeVar("Value")


def resolved(value: Value | None) -> Value:
    """The value. Raises ValueError for one that `dhp.config.resolve` has not filled in."""
    if value is None:
        raise ValueError("the configuration was not resolved: dhp.config.resolve.resolve fills in what is unset")
    return value
