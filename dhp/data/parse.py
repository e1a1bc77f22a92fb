"""A raw annotation to a Record, by the format of its dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dhp.base.errors import DataError
from dhp.data.formats.llava import read_llava
from dhp.data.formats.openai import read_openai
from dhp.data.formats.sharegpt import read_sharegpt
from dhp.data.media.resolver import MediaResolver
from dhp.data.records import Record, Turn

FORMATS: dict[str, Callable[[Mapping[str, Any], MediaResolver], tuple[Turn, ...]]] = {
    "llava": read_llava,
    "sharegpt": read_sharegpt,
    "openai": read_openai,
}


def parse_record(raw: Any, dataset: str, position: int, where: str, form: str, media: MediaResolver) -> Record:
    """Check one raw annotation and resolve its images, videos and sounds. form: one of FORMATS.

    DataError, with the reason alone, when keys or types are wrong, roles do not alternate, the last turn is not an
    answer, tags and images differ in number, or a file may not be read.
    """
    if not isinstance(raw, Mapping):
        raise DataError(f"expected an object with 'conversations' or 'messages', got {type(raw).__name__}")
    turns = FORMATS[form](raw, media)
    for number, turn in enumerate(turns, start=1):
        _check_text(number, turn)
    return Record(dataset, position, where, turns)


def detect(samples: Iterable[Any]) -> str:
    """The format of a dataset, by the first sample whose keys fit one format alone, else by the key of its turns.

    LLaVA where no sample fits: each sample then says what it lacks.
    """
    fallback = None
    for raw in samples:
        certain, likely = _recognise(raw)
        if certain:
            return certain
        fallback = fallback or likely
    return fallback or "llava"


def _check_text(number: int, turn: Turn) -> None:
    """JSON can hold one half of a character that UTF-16 writes as two; no tokenizer takes it."""
    try:
        "".join(part for part in turn.parts if isinstance(part, str)).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"turn {number}: the text holds half a character ({error.reason}). Write it anew") from error


def _recognise(raw: Any) -> tuple[str | None, str | None]:
    """(what a sample must be, what it may be): text alone looks alike in two formats."""
    if not isinstance(raw, Mapping):
        return None, None
    messages = raw.get("messages")
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)] if isinstance(messages, list) else []
    if any(isinstance(content, list) for content in contents):
        return "openai", None
    if "messages" in raw or "conversations" in raw:
        if any(raw.get(key) is not None for key in ("images", "videos", "audios")):
            return "sharegpt", None
        if "messages" in raw:
            return None, "sharegpt"
        named = any(raw.get(key) is not None for key in ("image", "video", "audio"))
        return ("llava", None) if named else (None, "llava")
    return None, None
