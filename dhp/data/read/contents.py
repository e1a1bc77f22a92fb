"""The content of a turn as a list of parts, in the ways of OpenAI, Anthropic, transformers, TRL, Qwen and others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dhp.core.errors import DataError
from dhp.data.media.resolver import MediaResolver
from dhp.data.media.sources import PLAIN, Frames, Settings, SizedImage, Sound, Video
from dhp.data.read.fields import PART, TOOLS, Fields, is_set
from dhp.data.read.records import Part

_TEXT = ("text", "input_text", "output_text")
_THOUGHTS = ("reasoning", "thinking")
_CALLS = ("tool_use", "tool_call", "tool_calls", "tool_result", "tool_response", "tool", "function", "function_call")
KINDS = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
}
_NAMED = ("path", "url", "base64", "value", "source", "file")  # where a part names its file, besides its own type
_FRAME_RATE = 2.0  # of a list of frames, as qwen_vl_utils has it
_FRACTIONS = ("fps", "video_start", "video_end", "sample_fps", "raw_fps")  # the other numbers are whole
_NUMBERS = {
    "min_pixels": "min_pixels", "max_pixels": "max_pixels", "fps": "fps", "nframes": "frames",
    "max_frames": "max_frames", "video_start": "start", "video_end": "end",
}  # fmt: skip


@dataclass(frozen=True)
class Bare:
    """A part that names no file: it gets the next one that is named outside the turns. kind: image, video or audio."""

    kind: str
    settings: Settings = PLAIN


@dataclass(frozen=True)
class Thoughts:
    """A part with what was reasoned."""

    text: str


def read_parts(number: int, content: list[Any], turn: Fields, media: MediaResolver) -> list[Part | Bare | Thoughts]:
    """The parts of a turn, files found. number: of the turn, 1-based. Raises DataError, with the reason alone."""
    return [_part(number, part, turn, media) for part in content]


def show(kind: str, value: Any, media: MediaResolver, settings: Settings = PLAIN, rate: float | None = None) -> Part:
    """A picture, video or clip by what a row calls it. kind: image, video or audio. rate: frames a second where the
    value is a list of them. Raises DataError."""
    if kind == "audio":
        return Sound(media.find(value, kind))
    if kind == "image":
        file = media.find(value, kind)
        return file if settings == PLAIN else SizedImage(file, settings)
    if isinstance(value, list | tuple):
        if not value:
            raise DataError("a video as a list of frames needs some; this list is empty")
        return Video(Frames(tuple(media.find(one, "image") for one in value), rate or _FRAME_RATE), settings)
    return Video(media.find(value, kind), settings)


def _part(number: int, raw: Any, turn: Fields, media: MediaResolver) -> Part | Bare | Thoughts:
    place = f"turn {number}"
    known = ", ".join(("text", *KINDS))
    kind = raw.get("type") if isinstance(raw, Mapping) else None
    if kind in _CALLS:
        raise DataError(f"{place}: a part of type {kind}: {TOOLS}")
    if not isinstance(kind, str) or kind not in (*_TEXT, *_THOUGHTS, *KINDS):
        raise DataError(f"{place}: a part must be an object of type {known}, got {raw!r:.80}")
    part = turn.within(raw, PART, place, "'type'")
    part.get("type")
    if kind in KINDS:
        return _shown(number, part, raw, media)
    text = part.get(part.first("text", kind, "value", "content") or "text")
    if not isinstance(text, str):
        raise DataError(f"{place}: 'text' of a part must be a string, got {text!r:.80}")
    return Thoughts(text) if kind in _THOUGHTS else text


def _shown(number: int, part: Fields, raw: Mapping[str, Any], media: MediaResolver) -> Part | Bare:
    name = part["type"]
    kind = KINDS[name]
    settings = _settings(part, kind, f"turn {number}")
    own = f"{kind}_url" if name.startswith("input_") and name not in part else name
    key = part.first(own, kind, *_NAMED)
    value = None if key is None else part.get(key)
    if not is_set(value):
        if name not in ("image", "video", "audio"):
            raise DataError(f"turn {number}: a part of type {name} must hold {name!r}, got {raw!r:.80}")
        return Bare(kind, settings)
    if name == "input_audio":
        value = _spoken(number, value)
    elif key == "base64" and isinstance(value, str) and not value.startswith("data:"):
        value = f"data:{kind};base64,{value}"
    elif isinstance(value, Mapping):
        value = _address(value, kind)
    return show(kind, value, media, settings, _rate(part, f"turn {number}") if isinstance(value, list) else None)


def _address(value: Mapping[str, Any], kind: str) -> Any:
    """The address in OpenAI's {url} or Anthropic's {type, media_type, data}; another mapping as it is."""
    if isinstance(value.get("data"), str):
        return f"data:{value.get('media_type') or kind};base64,{value['data']}"
    return value["url"] if "url" in value else value


def _spoken(number: int, value: Any) -> str:
    """The address of {data, format} in an input_audio part."""
    if not isinstance(value, Mapping) or not isinstance(value.get("data"), str):
        raise DataError(f"turn {number}: 'input_audio' must hold 'data' in base64 and 'format', got {value!r:.80}")
    return f"data:audio/{value.get('format')};base64,{value['data']}"


def _rate(part: Fields, place: str) -> float | None:
    key = next((key for key in ("sample_fps", "raw_fps", "fps") if part.has(key)), None)
    return None if key is None else _number(part.get(key), key, place)


def _settings(part: Fields, kind: str, place: str) -> Settings:
    """A part's settings of its picture or video. Raises DataError for anything but a number in its range."""
    if kind == "audio":
        return PLAIN
    keys = _NUMBERS if kind == "video" else ("min_pixels", "max_pixels")
    found = {key: _number(part.get(key), key, place) for key in keys if part.has(key)}
    whole: dict[str, Any] = {key: value if key in _FRACTIONS else int(value) for key, value in found.items()}
    settings = Settings(**{_NUMBERS[key]: value for key, value in whole.items()})
    if settings.end is not None and settings.end <= settings.start:
        raise DataError(f"{place}: 'video_end' {settings.end:g} is not after 'video_start' {settings.start:g}")
    if settings.frames is not None and (settings.fps, settings.max_frames) != (None, None):
        raise DataError(f"{place}: 'nframes' beside 'fps' or 'max_frames'; leave it or them out")
    return settings


def _number(value: Any, key: str, place: str) -> float:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and value < 1e9
    lowest = 0.0 if key == "video_start" else 1e-3 if key in _FRACTIONS else 1
    if not fits or value < lowest:
        raise DataError(f"{place}: {key!r} must be a number of at least {lowest:g}, got {value!r:.40}")
    return value
