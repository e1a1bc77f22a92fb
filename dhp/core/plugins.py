"""What modules of a user's may register, by the room that takes it. A room says what it has; nobody asks a room."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_TAKEN: dict[str, Callable[[], Iterable[type]]] = {}


def takes(what: str, classes: Callable[[], Iterable[type]]) -> None:
    """A room takes classes of modules. what: it is, in a word. classes: gives all that are registered now."""
    _TAKEN[what] = classes


def registered() -> list[type]:
    """All classes that are registered in the rooms that are imported by now."""
    return [kind for classes in _TAKEN.values() for kind in classes()]
