"""Files that a sample names beside its turns, under the singular or the plural of their kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dhp.base.errors import DataError
from dhp.data.formats.dialogue import Said, count_tags, listed, tagged_turns
from dhp.data.media.resolver import MediaResolver
from dhp.data.records import Turn


def turns_with_files(said: Sequence[Said], raw: Mapping[str, Any], media: MediaResolver) -> tuple[Turn, ...]:
    """Turns with the sample's images, videos and sounds in place of their tags; those of a kind that has no tag at all
    stand before the first question. Raises DataError, with the reason alone."""
    names = {kind: _either(raw, kind) for kind in ("image", "video", "audio")}
    missing = "".join(f"<{kind}>" * len(found) for kind, found in names.items() if not count_tags(said, kind))
    return tagged_turns(_in_front(said, missing), names["image"], names["video"], media, names["audio"])


def _either(raw: Mapping[str, Any], kind: str) -> list[Any]:
    one, several = listed(raw, kind), listed(raw, f"{kind}s")
    if one and several:
        raise DataError(f"both {kind!r} and '{kind}s' name files; name all of them under one")
    return one or several


def _in_front(said: Sequence[Said], tags: str) -> list[Said]:
    first = next((number for number, (role, _) in enumerate(said) if role == "user"), None)
    return [(role, tags + text if number == first else text) for number, (role, text) in enumerate(said)]
