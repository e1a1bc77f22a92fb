"""Turns what decoders of videos and audio raise into a DataError about the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dhp.core.errors import DataError


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Damaged bytes lead decoders to raise anything; all of it means that the file cannot be used.

    what: kind and name of the file. Raises DataError for whatever is raised inside, with the reason.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{what} cannot be decoded: {error or type(error).__name__}") from error
