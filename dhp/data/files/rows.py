"""The interface of all kinds of annotation files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dhp.data.media.sources import Member


@dataclass(frozen=True)
class RawSample:
    """One raw sample. members: the other files of the sample in its archive, by name; None: it is in no archive."""

    value: Any
    members: Mapping[str, Member] | None = None


class RawSamples(Protocol):
    """Random access to the raw samples of one dataset, 0-based. Safe to call from several threads."""

    def __len__(self) -> int: ...

    def locate(self, index: int) -> tuple[int, str]:
        """The 1-based position in the file, and the place in words ("line 5 of FILE")."""

    def read(self, index: int) -> RawSample:
        """One raw sample. Raises DataError, with the reason alone, if it cannot be read."""
