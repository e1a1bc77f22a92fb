"""Conversations as the model's chat template writes them, and which characters of that are answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from dhp.base.errors import DataError
from dhp.data.media.sources import Sound, Video
from dhp.data.records import Part, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# {"role": …, "content": [{"type": "image" | "video" | "audio"} | {"type": "text", "text": …}, …]}
Message = dict[str, Any]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """A conversation as text. spans: of each answer, [start, stop) in characters of `text`."""

    text: str
    spans: tuple[tuple[int, int], ...]


def to_messages(turns: tuple[Turn, ...]) -> list[Message]:
    """Turns in the form that chat templates of vision-language models read."""
    return [{"role": turn.role, "content": [_content(part) for part in turn.parts]} for turn in turns]


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> Rendered:
    """Write the conversation once and find the answers in it by the template's own word, never by searching text.

    A template with {% generation %} blocks marks the answers itself. For any other, answer i is what the
    template adds between "messages before i, then the prompt for an answer" and "messages up to i".
    DataError when the template refuses the conversation or rewrites earlier turns later on.
    """
    try:
        if _GENERATION.search(tokenizer.chat_template):
            return _render_marked(tokenizer, messages)
        return _render_by_prefix(tokenizer, messages)
    except TemplateError as error:
        raise DataError(f"the chat template of {tokenizer.name_or_path!r} refuses it: {error}") from error


def replace_each(rendered: Rendered, token: str, others: Sequence[str]) -> Rendered:
    """The conversation with others[i] instead of the i-th `token`, of which there are as many. The same words are
    answers as before."""
    pieces = rendered.text.split(token)
    joined = pieces[0] + "".join(other + piece for other, piece in zip(others, pieces[1:], strict=True))
    starts, at = [], 0
    for piece in pieces[:-1]:
        starts.append(at + len(piece))
        at = starts[-1] + len(token)
    grown = [len(other) - len(token) for other in others]
    moved = lambda end: end + sum(more for start, more in zip(starts, grown) if start < end)
    return Rendered(joined, tuple((moved(start), moved(stop)) for start, stop in rendered.spans))


def _content(part: Part) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Sound):
        return {"type": "audio"}
    return {"type": "video" if isinstance(part, Video) else "image"}


def _render_marked(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> Rendered:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        conversations=[messages],
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return Rendered(texts[0], tuple((start, stop) for start, stop in spans[0]))


def _render_by_prefix(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> Rendered:
    text = _write(tokenizer, messages, prompt=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _write(tokenizer, messages[:index], prompt=True)
        after = _write(tokenizer, messages[: index + 1], prompt=False)
        if not (after.startswith(before) and text.startswith(after)):
            raise DataError(
                f"the chat template of {tokenizer.name_or_path!r} writes turn {index + 1} differently once more "
                "turns follow, so its answer has no fixed place. Use a template with {% generation %} blocks, "
                "or split the conversation into one sample an answer"
            )
        spans.append((len(before), len(after)))
    return Rendered(text, tuple(spans))


def _write(tokenizer: PreTrainedTokenizerBase, messages: list[Message], prompt: bool) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
