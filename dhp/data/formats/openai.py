"""OpenAI: `messages` of role and content, where content is text or a list of parts."""

from __future__ import annotations

from dataclasses import replace

from dhp.data.formats.beside import turns_of
from dhp.data.formats.dialogue import statements, with_system
from dhp.data.formats.fields import Fields
from dhp.data.media.resolver import MediaResolver
from dhp.data.records import Turn


def read_openai(raw: Fields, media: MediaResolver) -> tuple[Turn, ...]:
    """The turns of a raw sample; where it names no file outside them, a tag is text. Raises DataError, with the reason
    alone."""
    said = with_system(raw, statements(raw, "messages", ("role", "content"), media))
    if not raw.has(*(f"{kind}{s}" for kind in ("image", "video", "audio") for s in ("", "s"))):
        said = [replace(one, tagged=False) for one in said]
    return turns_of(raw, said, media)
