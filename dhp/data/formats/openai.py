"""OpenAI: `messages` of role and content, where content is text or parts as image_url, video_url and input_audio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dhp.base.errors import DataError
from dhp.data.formats.dialogue import SOUND_KEYS, check_answer, check_order, entries_of, known_role
from dhp.data.media.resolver import MediaResolver
from dhp.data.media.sources import Sound, Video
from dhp.data.records import Part, Turn

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MEDIA = {
    "image_url": "image",
    "image": "image",
    "video_url": "video",
    "video": "video",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
}
_WRAPPED = {"video": Video, "audio": Sound}


def read_openai(raw: Mapping[str, Any], media: MediaResolver) -> tuple[Turn, ...]:
    """The turns of a raw sample. Raises DataError, with the reason alone."""
    for key in SOUND_KEYS:
        if raw.get(key):
            raise DataError(f"{key!r}: sound is a part of a turn's content here, of type input_audio or audio")
    turns = [_turn(number, entry, media) for number, entry in enumerate(entries_of(raw, "messages"), start=1)]
    check_order([turn.role for turn in turns])
    return tuple(turns)


def _turn(number: int, entry: Any, media: MediaResolver) -> Turn:
    if not isinstance(entry, Mapping):
        raise DataError(f"turn {number} must be an object with 'role' and 'content', got {type(entry).__name__}")
    if not isinstance(entry.get("role"), str):
        raise DataError(f"turn {number}: 'role' must be a string, got {entry.get('role')!r:.80}")
    role = known_role(number, entry["role"], ROLES)
    for key in ("tool_calls", "function_call"):
        if entry.get(key):
            raise DataError(f"turn {number}: {key!r} is not read; only text, images, videos and sound are")
    if entry.get("weight", 1) not in (None, 1):
        raise DataError(f"turn {number}: 'weight' {entry['weight']!r:.20}; every answer is learned with weight 1 here")
    parts = _parts(number, entry.get("content"), media)
    if role != "user" and not all(isinstance(part, str) for part in parts):
        raise DataError(
            f"turn {number}: images, videos and sound can only be in user turns, not in one from the {role}"
        )
    check_answer(number, role, "".join(part for part in parts if isinstance(part, str)))
    return Turn(role, parts if role == "user" else ("".join(map(str, parts)),))


def _parts(number: int, content: Any, media: MediaResolver) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list):
        raise DataError(f"turn {number}: 'content' must be a string or a list of parts, got {content!r:.80}")
    return tuple(_part(number, part, media) for part in content)


def _part(number: int, part: Any, media: MediaResolver) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise DataError(f"turn {number}: 'text' of a part must be a string, got {part.get('text')!r:.80}")
        return part["text"]
    if not isinstance(kind, str) or kind not in MEDIA:
        raise DataError(f"turn {number}: a part must be an object of type text, {', '.join(MEDIA)}, got {part!r:.80}")
    value = part.get(kind)
    if kind.endswith("_url") and isinstance(value, Mapping):
        value = value.get("url")
    if value is None:
        raise DataError(f"turn {number}: a part of type {kind} must hold {kind!r}, got {part!r:.80}")
    if kind == "input_audio":
        value = _address(number, value)
    file = media.find(value, MEDIA[kind])
    return _WRAPPED[MEDIA[kind]](file) if MEDIA[kind] in _WRAPPED else file


def _address(number: int, value: Any) -> str:
    """The address that {data, format} of an input_audio part stand for."""
    if not isinstance(value, Mapping) or not isinstance(value.get("data"), str):
        raise DataError(f"turn {number}: 'input_audio' must hold 'data' in base64 and 'format', got {value!r:.80}")
    return f"data:audio/{value.get('format')};base64,{value['data']}"
