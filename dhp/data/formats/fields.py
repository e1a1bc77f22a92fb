"""A raw object that records which of its keys its reader took, so that none is dropped silently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dhp.base.errors import DataError

_NOTHING = ("", b"", "[]", "{}")
ROW, TURN, PART = "", "turn", "part"


class Fields(Mapping[str, Any]):
    """One raw object: a row, a turn of it or a part of a turn. Looking a key up takes it; `in` and iteration take
    nothing."""

    def __init__(self, raw: Mapping[str, Any], level: str = ROW, place: str = "", row: Fields | None = None) -> None:
        """level: ROW, TURN or PART. place: of a turn or part in words, for errors. row: that it is in."""
        self.level, self.place = level, place
        self._raw, self._taken = raw, set[str]()
        self._all: list[Fields] = [] if row is None else row._all
        self._all.append(self)

    def __getitem__(self, key: str) -> Any:
        self._taken.add(key)
        return self._raw[key]

    def __contains__(self, key: object) -> bool:
        return key in self._raw

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def peek(self, key: str) -> Any:
        """The value of a key, which is not taken by that; None where there is none."""
        return self._raw.get(key)

    def has(self, *keys: str) -> bool:
        """Whether one of these keys is set. Takes none."""
        return any(key in self._raw and is_set(self._raw[key]) for key in keys)

    def first(self, *keys: str) -> str | None:
        """The first of these keys that is there, set ones before others; None where none is. Takes none."""
        there = [key for key in keys if key in self._raw]
        return next((key for key in there if is_set(self._raw[key])), there[0] if there else None)

    def within(self, raw: Any, level: str, place: str, wanted: str) -> Fields:
        """An object inside. wanted: what it should be. Raises DataError where it is no object."""
        if not isinstance(raw, Mapping):
            raise DataError(f"{place} must be an object with {wanted}, got {type(raw).__name__}")
        return Fields(raw, level, place, self)

    def left(self) -> Iterator[tuple[Fields, str, Any]]:
        """Keys that are set and were not taken, of this object and of those inside: where, key, value."""
        for fields in self._all:
            for key, value in fields._raw.items():
                if key not in fields._taken and is_set(value):
                    yield fields, str(key), value


def is_set(value: Any) -> bool:
    """Whether a value says anything: tables fill the keys that a row does not have with null, also inside."""
    if isinstance(value, str):
        return value not in _NOTHING
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Mapping | list | tuple):
            left += one.values() if isinstance(one, Mapping) else one
        elif one is not None and one not in _NOTHING:
            return True
    return False
