"""ShareGPT: `messages` of role and content, or `conversations` of from and value, and files under keys of
their own."""

from __future__ import annotations

from dhp.data.formats.beside import turns_of
from dhp.data.formats.dialogue import statements, with_system
from dhp.data.formats.fields import Fields
from dhp.data.media.resolver import MediaResolver
from dhp.data.records import Turn


def read_sharegpt(raw: Fields, media: MediaResolver) -> tuple[Turn, ...]:
    """The turns of a raw sample. Raises DataError, with the reason alone."""
    old = "conversations" in raw and "messages" not in raw
    key, names = ("conversations", ("from", "value")) if old else ("messages", ("role", "content"))
    return turns_of(raw, with_system(raw, statements(raw, key, names, media)), media)
