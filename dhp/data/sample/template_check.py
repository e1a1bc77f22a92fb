"""Checks that a chat template wrote a conversation whole."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dhp.core.errors import DataError
from dhp.core.process import OutOfTime, time_limit
from dhp.data.read.records import ANSWERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Write = Callable[[list[Message]], str]
Spans = Sequence[tuple[int, int]]

LIMIT_S = 60.0  # for a conversation, which takes milliseconds
_SHOWN = 60  # characters of a text in an error
_WORD = "dhp7answer"  # no template has it
# <think></think> with nothing but space inside, which some templates leave out of earlier answers.
_EMPTY_THOUGHTS = re.compile(r"\s*[<◁\[](?:\w+:)?think[>▷\]]\s*[<◁\[]/(?:\w+:)?think[>▷\]]\s*", re.IGNORECASE)
_TAG = re.compile(r"[<◁\[](/?)(?:\w+:)?think[>▷\]]", re.IGNORECASE)
_NONE: Mapping[str, str] = MappingProxyType({})
_SPACE = re.compile(r"\s+")


def check_written(text: str, spans: Spans, messages: Sequence[Message], marks: Mapping[str, str] = _NONE) -> None:
    """Raise DataError where a text or thought of the conversation is not in `text`, the rendered one, in order; space
    and newlines count alike. spans: of the answers; where there is one for each, an answer is looked for in its own.
    marks: what stands for a picture, by type of part: pictures have to be between the same texts, unless those of a
    turn stand together, there and in the turn."""
    answers = sum(message["role"] == ANSWERS for message in messages)
    paired, place, number, behind = len(spans) == answers, 0, 0, 0
    found = {mark: text.count(mark) for mark in marks.values()}
    pictures = sum(found.values())
    shown = sum(item in found for message in messages for item, _ in _texts(message, marks)) if pictures else 0
    for turn, message in enumerate(messages, start=1):
        stop = spans[number][0] if paired and number < answers else len(text)
        if message["role"] == ANSWERS:
            if paired:
                place, stop = spans[number]
                behind = max(behind, place)
            number += 1
        for written, thought in _texts(message):
            end = _find(text, written, place, stop)
            if end is None:
                raise DataError(_lost(written, thought, turn, message["role"], number))
            place = end
        if 0 < shown == pictures:  # where not, miscounted placeholders are the error
            items = [written for written, _ in _texts(message, marks)]
            behind = _pass_pictures(text, items, found, behind, stop, turn)


def _pass_pictures(text: str, items: list[str], marks: Mapping[str, int], place: int, stop: int, turn: int) -> int:
    """Where a turn's texts and pictures end, in order and each as early as can be. Pictures that stand together in the
    turn may stand before its texts or behind them. Raises DataError where they are elsewhere."""
    pictures, texts = ([item for item in items if (item in marks) == are] for are in (True, False))
    together = sum(1 for are, _ in itertools.groupby(items, marks.__contains__) if are) < 2
    ends = []
    for order in (items, pictures + texts, texts + pictures) if together else (items,):
        end: int | None = place
        for item in order:
            end = _find(text, item, end, stop) if end is not None else None
        ends += [] if end is None else [end]
    if not ends:
        raise DataError(
            f"the chat template moves pictures of turn {turn} to another place among its words. Name a template that "
            "leaves them where they are in data.chat_template, or write them where it puts them"
        )
    return min(ends)


def _texts(message: Message, marks: Mapping[str, str] = _NONE) -> Iterator[tuple[str, bool]]:
    """Texts of a turn in the order in which they are written, and which of them are thoughts; with the marks of its
    pictures among them."""
    if message.get("reasoning_content", "").strip():
        yield message["reasoning_content"].strip(), True
    for part in message["content"] if not isinstance(message["content"], str) else [{"text": message["content"]}]:
        if part.get("type") in marks:
            yield marks[part["type"]], False
        elif part.get("text", "").strip():
            yield part["text"].strip(), False


def _find(text: str, written: str, place: int, stop: int) -> int | None:
    """Where `written` ends in text[place:stop]; None: it is not there."""
    at = text.find(written, place, stop)
    if at >= 0:
        return at + len(written)
    first = _TAG.search(written)
    if first is not None and first[1]:
        return None  # words of the answer became a thought
    begun = first is not None and not written[: first.start()].strip()
    rest = written[first.end() :] if first is not None and begun else written  # the prompt may have opened the thoughts
    for candidate in (written, _EMPTY_THOUGHTS.sub(" ", written), rest):
        found = re.compile(_pattern(candidate)).search(text, place, stop)
        if found is not None:
            return found.end()
    return None


def _pattern(written: str) -> str:
    """A regular expression for the text with any space between its words, and any or none around tags of thoughts."""
    words = _TAG.sub(r" \g<0> ", written).split()
    pattern = "".join(re.escape(word) for word in words[:1])
    for before, word in itertools.pairwise(words):
        loose = _TAG.fullmatch(before) or _TAG.fullmatch(word)
        pattern += (r"\s*" if loose else r"\s+") + re.escape(word)
    return pattern


def _lost(written: str, thought: bool, turn: int, role: str, answer: int) -> str:
    if thought:
        return (
            f"answer {answer} has reasoning_content, which the chat template does not write there. Name "
            "one that does in data.chat_template, write the thoughts into the answer's text in its own marks, "
            "or split the conversation into one sample an answer"
        )
    shown = _SPACE.sub(" ", written)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
    remedy = (
        "split the conversation into one sample an answer" if role == ANSWERS else "write it into the first question"
    )
    return (
        f"the chat template leaves out or rewrites text of turn {turn} ({role}): {shown!r}. Name a template that "
        f"writes it in data.chat_template, or {remedy}"
    )


def takes_strings(write: Write) -> bool:
    """Whether a template takes the text of a turn as one string: of a list of parts it writes Python's brackets, or
    nothing. write: renders messages."""
    by_parts = _try(write, [{"role": "user", "content": [{"type": "text", "text": _WORD}]}])
    if _WORD in by_parts and not re.search(rf"\{{[^{{}}]*{_WORD}[^{{}}]*\}}", by_parts):
        return False
    return _WORD in _try(write, [{"role": "user", "content": _WORD}])


def _try(write: Write, messages: list[Message]) -> str:
    """What the template writes; "" where it refuses: a sample that is rendered says why."""
    try:
        return write(messages)
    except (MemoryError, OutOfTime):
        raise
    except Exception:  # a template is a program, and fails as any; some add strings to the content
        return ""


def as_strings(messages: Sequence[Message]) -> list[Message]:
    """The conversation with each turn's texts as one string. Raises DataError for one with pictures or sounds."""
    return [dict(message) | {"content": _string(turn, message["content"])} for turn, message in enumerate(messages, 1)]


def _string(turn: int, parts: Sequence[Mapping[str, str]]) -> str:
    others = [part["type"] for part in parts if part["type"] != "text"]
    if others:
        raise DataError(
            f"turn {turn} shows {len(others)} {others[0]}s, and the chat template takes text alone. Name one of the "
            "model's family in data.chat_template"
        )
    return "".join(part["text"] for part in parts)


def find_answer_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token by which the chat template ends an answer behind which nothing follows: the first behind the answer, if
    it is one of the tokenizer's added ones. None: it writes none, or refuses a conversation of two words."""
    write: Write = lambda messages: str(tokenizer.apply_chat_template(messages, tokenize=False))
    turns = [(role, [{"type": "text", "text": _WORD}]) for role in ("user", ANSWERS)]
    messages: list[Message] = [{"role": role, "content": content} for role, content in turns]
    try:
        with time_limit(LIMIT_S):
            text = _try(write, as_strings(messages) if takes_strings(write) else messages)
    except OutOfTime:  # which a sample that is rendered says
        return None
    _, word, behind = text.rpartition(_WORD)
    for token in tokenizer(behind, add_special_tokens=False)["input_ids"] if word else []:
        if token in tokenizer.added_tokens_decoder:
            return int(token)
        if tokenizer.decode([token]).strip():
            return None
    return None
