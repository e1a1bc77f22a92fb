"""ms-swift, and rows of other makers that are like its own: `messages`, a question and an answer, `conversation` or
`texts` of exchanges; files are named outside them, and those without a tag go before the first question."""

from __future__ import annotations

from dhp.data.formats.beside import turns_of
from dhp.data.formats.dialogue import Said, statements, with_system
from dhp.data.formats.fields import Fields
from dhp.data.formats.pairs import read_pair
from dhp.data.media.resolver import MediaResolver
from dhp.data.records import Turn

_LISTS = {
    "messages": ("role", "content"),
    "conversations": ("from", "value"),
    "conversation": ("human", "assistant"),
    "texts": ("user", "assistant"),
}


def read_swift(raw: Fields, media: MediaResolver) -> tuple[Turn, ...]:
    """The turns of a raw sample. Raises DataError, with the reason alone."""
    return turns_of(raw, with_system(raw, _said(raw, media)), media, in_front=True)


def _said(raw: Fields, media: MediaResolver) -> list[Said]:
    for key, names in _LISTS.items():
        if raw.has(key):
            return statements(raw, key, names, media)
    return read_pair(raw, media)
