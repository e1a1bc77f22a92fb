"""LLaVA: `conversations` of from and value, and files under keys of their own."""

from __future__ import annotations

from dataclasses import replace

from dhp.data.formats.beside import count_tags, turns_of
from dhp.data.formats.dialogue import statements, with_system
from dhp.data.formats.fields import Fields
from dhp.data.media.resolver import MediaResolver
from dhp.data.records import Turn


def read_llava(raw: Fields, media: MediaResolver) -> tuple[Turn, ...]:
    """The turns of a raw sample. Raises DataError, with the reason alone."""
    said = with_system(raw, statements(raw, "conversations", ("from", "value"), media))
    shows_images, shows_videos = raw.has("image", "images"), raw.has("video", "videos")
    if shows_videos and not shows_images and not count_tags(said, "video"):
        # LLaVA's own video sets write <image> where the video is.
        said = [
            replace(one, parts=(one.text.replace("<image>", "<video>"),)) if one.role == "user" and one.tagged else one
            for one in said
        ]
    return turns_of(raw, said, media)
