"""Plain text for continued pre-training: `text`, all of whose tokens are learned."""

from __future__ import annotations

from dhp.base.errors import DataError
from dhp.data.formats.dialogue import required_text
from dhp.data.formats.fields import Fields
from dhp.data.media.resolver import MediaResolver
from dhp.data.records import WRITES, Turn


def read_text(raw: Fields, media: MediaResolver) -> tuple[Turn, ...]:
    """The one turn of a raw sample, which no chat template writes. Raises DataError, with the reason alone."""
    text = required_text(raw, "text")
    if not text.strip():
        raise DataError("'text' is empty")
    return (Turn(WRITES, (text,)),)
