"""Parses a raw annotation to a Record, by the format of its dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dhp.base.errors import DataError
from dhp.data.formats.alpaca import read_alpaca
from dhp.data.formats.fields import Fields
from dhp.data.formats.llava import read_llava
from dhp.data.formats.openai import read_openai
from dhp.data.formats.pairs import is_pair
from dhp.data.formats.refused import check_left
from dhp.data.formats.sharegpt import read_sharegpt
from dhp.data.formats.swift import read_swift
from dhp.data.formats.text import read_text
from dhp.data.formats.unknown import read_unknown
from dhp.data.media.resolver import MediaResolver
from dhp.data.records import Record, Turn

FORMATS: dict[str, Callable[[Fields, MediaResolver], tuple[Turn, ...]]] = {
    "llava": read_llava,
    "sharegpt": read_sharegpt,
    "openai": read_openai,
    "alpaca": read_alpaca,
    "swift": read_swift,
    "text": read_text,
    "unknown": read_unknown,  # what `detect` could not tell
}
_FILES = ("image", "video", "audio")


def parse_record(raw: Any, dataset: str, position: int, where: str, form: str, media: MediaResolver) -> Record:
    """Check one raw annotation and resolve its images, videos and sounds. form: one of FORMATS.

    DataError, with the reason alone, when keys or types are wrong, roles do not alternate, the last turn is not an
    answer, tags and images differ in number, a file may not be read, or a key that changes what is learned is not read.
    """
    if not isinstance(raw, Mapping):
        raise DataError(f"expected an object with 'conversations' or 'messages', got {type(raw).__name__}")
    row = Fields(raw)
    turns = FORMATS[form](row, media)
    for number, turn in enumerate(turns, start=1):
        _check_text(number, turn)
    shows = any(not isinstance(part, str) for turn in turns for part in turn.parts)
    return Record(dataset, position, where, turns, check_left(row, shows))


def detect(samples: Iterable[Any]) -> str:
    """The format of a dataset, by the first sample whose keys fit one format alone, else by the key of its turns.

    unknown where no sample fits: each sample then lists what is known.
    """
    fallback = None
    for raw in samples:
        certain, likely = _recognise(raw)
        if certain:
            return certain
        fallback = fallback or likely
    return fallback or "unknown"


def _check_text(number: int, turn: Turn) -> None:
    """JSON can hold one half of a character that UTF-16 writes as two; no tokenizer takes it."""
    try:
        "".join((turn.thoughts, *(part for part in turn.parts if isinstance(part, str)))).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"turn {number}: the text holds half a character ({error.reason}). Write it anew") from error


def _recognise(raw: Any) -> tuple[str | None, str | None]:
    """(what a sample must be, what it may be): text alone looks alike in two formats."""
    if not isinstance(raw, Mapping):
        return None, None
    row = Fields(raw)
    singular, plural = row.has(*_FILES), row.has(*(f"{kind}s" for kind in _FILES))
    if row.has("messages"):
        return _of_messages(raw, singular, plural)
    if "conversations" in raw:
        if plural:
            return "sharegpt", None
        return ("llava", None) if singular else (None, "llava")
    if row.has("instruction") and row.has("output"):
        return "alpaca", None
    if row.has("response", "conversation", "texts") or is_pair(row):
        return "swift", None
    return (None, "sharegpt") if "messages" in raw else (None, None)


def _of_messages(raw: Mapping[str, Any], singular: bool, plural: bool) -> tuple[str | None, str | None]:
    messages = raw["messages"] if isinstance(raw["messages"], list) else []
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    if any(isinstance(content, list) for content in contents):
        return "openai", None
    tagged = any(f"<{kind}>" in content for content in contents if isinstance(content, str) for kind in _FILES)
    if singular or (plural and not tagged):
        return "swift", None
    return ("sharegpt", None) if plural else (None, "sharegpt")
