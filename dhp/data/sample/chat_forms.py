"""Remembers what a chat template writes around the texts of conversations of one form."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, zip_longest

from dhp.core.process import OutOfTime
from dhp.data.sample.template_check import Message

Place = tuple[int, int]  # the number of a string around the texts, and a place in it
Form = tuple[str, tuple[tuple[str, bool, tuple[str, ...] | None], ...]]
Spans = tuple[tuple[int, int], ...]
_WORD = "dhp7text{}end"  # no template has it
_MOST = 1000  # forms that are remembered
_PATIENCE = 100  # conversations of a form that do not fit, before it is learned anew
_THOUGHTS = re.compile(r"[<◁\[]/?(?:\w+:)?(?:think|thinking|thoughts?|reasoning)[>▷\]]", re.IGNORECASE)


@dataclass(frozen=True)
class Around:
    """The strings before, between and behind the texts of a conversation, and the ends of its answers."""

    strings: tuple[str, ...]
    spans: tuple[tuple[Place, Place], ...]

    def spans_in(self, text: str, contents: Sequence[str]) -> Spans | None:
        """Where the answers are in `text`, the rendered one; None where it is anything but these strings around
        `contents`, each as it is or all without the space around them."""
        for written in (contents, [one.strip() for one in contents]):
            pieces = list(chain.from_iterable(zip_longest(self.strings, written, fillvalue="")))
            if "".join(pieces) == text:
                starts = [0, *accumulate(map(len, pieces))]
                return tuple((starts[2 * a] + at, starts[2 * b] + to) for (a, at), (b, to) in self.spans)
        return None


class Forms:
    """Of conversations, by template: a form is learned when it comes for the first time."""

    def __init__(self) -> None:
        self._known: dict[Form, Around | None] = {}
        self._missed: Counter[Form] = Counter()

    def spans_in(
        self,
        template: str,
        messages: Sequence[Message],
        text: Callable[[], str],
        learn: Callable[[list[Message]], tuple[str, Spans]],
    ) -> tuple[str, Spans] | None:
        """The rendered conversation and where its answers are; None where it has to be looked at by itself.

        text: renders it. learn: renders another one, and finds its answers."""
        form = template, tuple(map(_form, messages))
        if any(_THOUGHTS.search(one) for one in _texts(messages)):
            return None  # where an answer begins depends on them
        if form not in self._known:
            if len(self._known) < _MOST:
                self._known[form] = None
                self._known[form] = _learn(messages, learn)
            return None
        around = self._known[form]
        rendered = None if around is None else text()
        spans = None if around is None or rendered is None else around.spans_in(rendered, _texts(messages))
        if spans is None or rendered is None:
            self._missed[form] += 1
            if self._missed[form] % _PATIENCE == 0:  # what it writes may have changed, as a date does
                del self._known[form]
            return None
        return rendered, spans


def _learn(messages: Sequence[Message], learn: Callable[[list[Message]], tuple[str, Spans]]) -> Around | None:
    """From the same conversation with words of ours for its texts."""
    words = [_WORD.format(number) for number in range(len(_texts(messages)))]
    try:
        text, spans = learn(_with_texts(messages, words))
    except (MemoryError, OutOfTime):
        raise
    except Exception:  # the conversation itself says why
        return None
    if any(text.count(word) != 1 for word in words) or sorted(words, key=text.find) != words:
        return None
    strings, rest = [], text
    for word in words:
        before, _, rest = rest.partition(word)
        strings.append(before)
    strings.append(rest)
    ends = tuple((_place(text, words, start), _place(text, words, stop)) for start, stop in spans)
    if any(place > len(strings[number]) for span in ends for number, place in span):
        return None  # within a text
    return Around(tuple(strings), ends)


def _place(text: str, words: Sequence[str], at: int) -> Place:
    """Behind the last word that ends before `at` or there."""
    ends = [0, *(end for end in (text.find(word) + len(word) for word in words) if end <= at)]
    return len(ends) - 1, at - ends[-1]


def _form(message: Message) -> tuple[str, bool, tuple[str, ...] | None]:
    content = message["content"]
    parts = None if isinstance(content, str) else tuple(part["type"] for part in content)
    return message["role"], "reasoning_content" in message, parts


def _texts(messages: Sequence[Message]) -> list[str]:
    """In the order in which templates write them: thoughts before their answer."""
    found = []
    for message in messages:
        content = message["content"]
        found += [message["reasoning_content"]] if "reasoning_content" in message else []
        found += [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
    return found


def _with_texts(messages: Sequence[Message], words: Sequence[str]) -> list[Message]:
    left, changed = iter(words), []
    for message in messages:
        other = dict(message)
        if "reasoning_content" in message:
            other["reasoning_content"] = next(left)
        if isinstance(message["content"], str):
            other["content"] = next(left)
        else:
            other["content"] = [part | {"text": next(left)} if "text" in part else part for part in message["content"]]
        changed.append(other)
    return changed
