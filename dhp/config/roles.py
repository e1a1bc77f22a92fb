"""Roles of keys: resume, search and layout, beside each key."""

from collections.abc import Callable
from dataclasses import MISSING, field, fields
from typing import Any

# A run that goes on: held to the value that it had; to it as part of the recipe, unless training.resume_changes says
# otherwise; not at all, though the key is of the recipe; not at all, as it decides nothing that is trained.
HELD, RECIPE, FREE, BESIDE = "held", "recipe", "free", "beside"
# A search for layouts: sets the key; follows with the key what it sets; leaves it as it is.
SEARCHED, FOLLOWS, FIXED = "searched", "follows", "fixed"


def key(
    default: Any = MISSING,
    factory: Callable[[], Any] | None = None,
    resume: str = RECIPE,
    layout: str = FIXED,
    advanced: bool = False,
) -> Any:
    """A field of a section. factory: makes the default. resume, layout: what the key is to either. advanced: few runs
    need it, and the reference has it apart."""
    metadata = {"resume": resume, "layout": layout, "advanced": advanced}
    return (
        field(default=default, metadata=metadata)
        if factory is None
        else field(default_factory=factory, metadata=metadata)
    )


def keys_with(section: Any, **roles: str) -> tuple[str, ...]:
    """Names of a section's keys with these roles, as `resume="held"`, in order."""
    plain = {"resume": RECIPE, "layout": FIXED}
    return tuple(one.name for one in fields(section) if roles.items() <= ({**plain, **one.metadata}).items())
