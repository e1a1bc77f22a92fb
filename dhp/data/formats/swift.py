"""ms-swift: `messages`, or `query` and `response` with `history`, or `conversation` of human and assistant; files are
named beside them, and those without a tag stand before the first question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dhp.base.errors import DataError
from dhp.data.formats.beside import turns_with_files
from dhp.data.formats.dialogue import (
    Said,
    check_answer,
    entries_of,
    optional_text,
    pairs_before,
    required_text,
    statement,
    with_system,
)
from dhp.data.media.resolver import MediaResolver
from dhp.data.records import Turn

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


def read_swift(raw: Mapping[str, Any], media: MediaResolver) -> tuple[Turn, ...]:
    """The turns of a raw sample. Raises DataError, with the reason alone."""
    if raw.get("objects"):
        raise DataError("'objects' are not read: write boxes into the text, in the words that the model uses for them")
    return turns_with_files(with_system(raw, _said(raw)), raw, media)


def _said(raw: Mapping[str, Any]) -> list[Said]:
    if raw.get("messages") is not None:
        return [_statement(n, entry, ("role", "content")) for n, entry in enumerate(entries_of(raw, "messages"), 1)]
    if raw.get("conversations") is not None:
        entries = entries_of(raw, "conversations")
        return [_statement(n, entry, ("from", "value")) for n, entry in enumerate(entries, 1)]
    if raw.get("conversation") is not None:
        return [one for n, entry in enumerate(entries_of(raw, "conversation"), 1) for one in _exchange(n, entry)]
    answer = required_text(raw, "response")
    said = [*pairs_before(raw), ("user", optional_text(raw, "query")), ("assistant", answer)]
    check_answer(len(said), "assistant", answer)
    return said


def _statement(number: int, entry: Any, keys: tuple[str, str]) -> Said:
    said = statement(number, entry, keys, ROLES)
    if entry.get("loss", True) not in (None, True, 1):
        raise DataError(f"turn {number}: 'loss' {entry['loss']!r:.20}; every answer is learned with weight 1 here")
    return said


def _exchange(number: int, entry: Any) -> tuple[Said, Said]:
    if not isinstance(entry, Mapping):
        raise DataError(f"exchange {number} must be an object with 'human' and 'assistant', got {type(entry).__name__}")
    question, answer = (entry.get(key) for key in ("human", "assistant"))
    if not isinstance(question, str) or not isinstance(answer, str):
        raise DataError(f"exchange {number}: 'human' and 'assistant' must be strings, got {dict(entry)!r:.80}")
    check_answer(2 * number, "assistant", answer)
    return ("user", question), ("assistant", answer)
