"""ShareGPT: `messages` of role and content (or `conversations` of from and value), and lists `images`, `videos` and
`audios`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dhp.data.formats.dialogue import entries_of, listed, listed_sounds, statement, tagged_turns, with_system
from dhp.data.media.resolver import MediaResolver
from dhp.data.records import Turn

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


def read_sharegpt(raw: Mapping[str, Any], media: MediaResolver) -> tuple[Turn, ...]:
    """The turns of a raw sample. Raises DataError, with the reason alone."""
    old = "conversations" in raw and "messages" not in raw
    keys = ("from", "value") if old else ("role", "content")
    entries = entries_of(raw, "conversations" if old else "messages")
    said = [statement(number, entry, keys, ROLES) for number, entry in enumerate(entries, start=1)]
    said = with_system(raw, said)
    return tagged_turns(said, listed(raw, "images"), listed(raw, "videos"), media, listed_sounds(raw))
