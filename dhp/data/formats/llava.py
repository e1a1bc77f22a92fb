"""LLaVA: `conversations` of from and value, `image`, `video` and `audio` as one path or a list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dhp.data.formats.dialogue import count_tags, entries_of, listed, listed_sounds, statement, tagged_turns
from dhp.data.media.resolver import MediaResolver
from dhp.data.records import Turn

ROLES = {"system": "system", "human": "user", "gpt": "assistant"}


def read_llava(raw: Mapping[str, Any], media: MediaResolver) -> tuple[Turn, ...]:
    """The turns of a raw sample. Raises DataError, with the reason alone."""
    said = [
        statement(number, entry, ("from", "value"), ROLES)
        for number, entry in enumerate(entries_of(raw, "conversations"), start=1)
    ]
    images, videos = listed(raw, "image"), listed(raw, "video")
    if videos and not images and not count_tags(said, "video"):
        # LLaVA's own video sets write <image> where the video is.
        said = [(role, text.replace("<image>", "<video>") if role == "user" else text) for role, text in said]
    return tagged_turns(said, images, videos, media, listed_sounds(raw))
