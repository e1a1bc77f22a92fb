"""Decoders of videos and sound: what they raise, told as what is wrong with a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dhp.base.errors import DataError


@contextmanager
def decoding(told: str) -> Iterator[None]:
    """Damaged bytes lead decoders to raise anything; all of it means that the file cannot be used.

    told: what it is, and its name. Raises DataError for whatever is raised inside, with the reason.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{told} cannot be decoded: {error or type(error).__name__}") from error
