"""Applies the chat template and marks its answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from dhp.core.errors import ConfigError, DataError
from dhp.core.process import OutOfTime, time_limit
from dhp.data.media.sources import Sound, Video
from dhp.data.read.records import ANSWERS, Part, Turn
from dhp.data.sample.chat_forms import Forms
from dhp.data.sample.template_check import LIMIT_S, Message, as_strings, check_written, takes_strings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

_FORMS = Forms()
_OF_STRINGS: dict[str, bool] = {}  # by template: whether it takes strings alone

_ASKED = "add_generation_prompt"  # in templates that write a prompt for an answer
_WORD = "ANSWER"

# <think></think> with nothing but space inside, in the spellings of several families.
_THOUGHTS = r"(?:\w+:)?(?:think|thinking|thoughts?|reasoning)[>▷\]]"
_BLOCK = rf"[<◁\[]{_THOUGHTS}\s*[<◁\[]/{_THOUGHTS}\n*"
_EMPTY_THOUGHTS = re.compile(_BLOCK, re.IGNORECASE)
_AT_END = re.compile(rf"(?:{_BLOCK}|[<◁\[]{_THOUGHTS}\s*)\Z", re.IGNORECASE)  # of a prompt for an answer
_AT_START = re.compile(rf"\s*(?:{_BLOCK}|[<◁\[]/{_THOUGHTS}\n*)", re.IGNORECASE)  # the prompt may have opened it


@dataclass(frozen=True)
class Rendered:
    """A conversation as text. spans: of each answer, [start, stop) in characters of `text`."""

    text: str
    spans: tuple[tuple[int, int], ...]


def to_messages(turns: tuple[Turn, ...], system: str | None = None) -> list[Message]:
    """Turns in the form that chat templates of vision-language models take. system: text of a system turn that comes
    first where there is none; None: there is none then."""
    if system is not None and turns[0].role != "system":
        turns = (Turn("system", (system,)), *turns)
    return [_message(turn) for turn in turns]


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    learn_empty_thoughts: bool = False,
    learned: Sequence[bool] | None = None,
    marks: Mapping[str, str] = MappingProxyType({}),
) -> Rendered:
    """Render the conversation once and locate the answers in it by the template itself, never by searching text.

    A template with {% generation %} blocks marks the answers itself. For any other, answer i is what the
    template adds between "messages before i, then the prompt for an answer" and "messages up to i". Neither has the
    prompt for an answer in it, nor, unless learn_empty_thoughts, an empty block of thoughts that the template put
    before an answer without any. A conversation that ends before an answer is written with the prompt for it.
    learned: which answers have a span, in order; None: all. marks: see `check_written`.
    DataError when the template refuses the conversation, rewrites earlier turns later on, leaves thoughts out, or takes
    more than LIMIT_S."""
    try:
        with time_limit(LIMIT_S):
            if _takes_strings(tokenizer):
                messages = as_strings(messages)
            if messages[-1]["role"] != ANSWERS:
                rendered = Rendered(_write(tokenizer, messages, prompt=True) + _opening(tokenizer, messages), ())
            else:
                rendered = _render_by_form(tokenizer, messages)
    except (DataError, MemoryError):
        raise
    except OutOfTime as error:
        raise DataError(
            f"the chat template of {tokenizer.name_or_path!r} has not written it within {LIMIT_S:g} s: its loops may "
            "never end. Look at it (chat_template.jinja in the model's folder), or name another in data.chat_template"
        ) from error
    except Exception as error:  # a template is a program, and fails as any
        raise DataError(
            f"the chat template of {tokenizer.name_or_path!r} refuses it: {error or type(error).__name__}"
        ) from error
    check_written(rendered.text, rendered.spans, messages, marks)
    rendered = rendered if learn_empty_thoughts else _without_empty_thoughts(rendered, messages)
    return rendered if learned is None or all(learned) else _only(rendered, learned)


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
    moved: Callable[[int], int] = lambda end: end + sum(more for start, more in zip(starts, grown) if start < end)
    return Rendered(joined, tuple((moved(start), moved(stop)) for start, stop in rendered.spans))


def _message(turn: Turn) -> Message:
    thoughts = {"reasoning_content": turn.thoughts} if turn.thoughts else {}
    return {"role": turn.role, "content": [_content(part) for part in turn.parts], **thoughts}


def _only(rendered: Rendered, learned: Sequence[bool]) -> Rendered:
    if len(rendered.spans) != len(learned):
        raise DataError(
            f"{len(learned)} answers, of which some are not to be learned, but the chat template marks "
            f"{len(rendered.spans)} pieces. Use a template with one {{% generation %}} block for each answer"
        )
    return Rendered(rendered.text, tuple(span for span, own in zip(rendered.spans, learned) if own))


def _content(part: Part) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Sound):
        return {"type": "audio"}
    return {"type": "video" if isinstance(part, Video) else "image"}


def _render_by_form(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> Rendered:
    """As the template wrote another conversation of the same form, where it writes this one so too."""
    marked = _GENERATION.search(tokenizer.chat_template) is not None
    render_alone = partial(_render_marked if marked else _render_by_prefix, tokenizer)

    def learn(others: list[Message]) -> tuple[str, tuple[tuple[int, int], ...]]:
        rendered = render_alone(others)
        return rendered.text, rendered.spans

    text = partial(_write, tokenizer, messages, prompt=False)
    found = _FORMS.spans_in(tokenizer.chat_template, messages, text, learn)
    return render_alone(messages) if found is None else Rendered(*found)


def _render_marked(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> Rendered:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        conversations=[messages],
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    prompts = _prompts(tokenizer, messages)
    return Rendered(texts[0], tuple((min(_after(prompts, texts[0], start), stop), stop) for start, stop in spans[0]))


def _prompts(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> tuple[str, ...]:
    """The template's generation prompt, as it is and without thoughts that it opens."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), 0)
    plain, asking = (_write(tokenizer, messages[:first], prompt=asked) for asked in (False, True))
    prompt = asking[len(plain) :] if asking.startswith(plain) else ""
    prompt = prompt or _opening(tokenizer, messages[:first])
    return prompt, _AT_END.sub("", prompt)


def _opening(tokenizer: PreTrainedTokenizerBase, before: list[Message]) -> str:
    """The text before an answer from a template without a generation prompt, found with an answer of one word."""
    if _ASKED in tokenizer.chat_template:
        return ""
    plain = _write(tokenizer, before, prompt=False)
    word = _WORD if _takes_strings(tokenizer) else [_content(_WORD)]
    answered = _write(tokenizer, [*before, {"role": "assistant", "content": word}], prompt=False)
    place = answered.find(_WORD, len(plain))
    if place < 0 or not answered.startswith(plain):
        return ""
    # A space may share a token with the answer's first word, and alone is no opening.
    opening = _AT_END.sub("", answered[len(plain) : place]).rstrip(" ")
    return opening if opening.strip() else ""


def _after(prompts: Sequence[str], text: str, start: int) -> int:
    """`start`, or the end of a prompt for an answer that reaches beyond it."""
    for prompt in prompts:
        for cut in range(len(prompt), -1, -1):
            if text.endswith(prompt[:cut], 0, start) and text.startswith(prompt[cut:], start):
                return start + len(prompt) - cut
    return start


def _render_by_prefix(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> Rendered:
    text = _write(tokenizer, messages, prompt=False)
    answers = [index for index, message in enumerate(messages) if message["role"] == ANSWERS]
    spans = []
    for index in answers:
        before = _write(tokenizer, messages[:index], prompt=True) + _opening(tokenizer, messages[:index])
        after = _write(tokenizer, messages[: index + 1], prompt=False) if index < answers[-1] else text
        span, shorter = (len(before), len(after)), after
        if not after.startswith(before):  # nothing is written of the thoughts that the prompt opens
            span = (len(before := _AT_END.sub("", before)), len(after))
        if not text.startswith(after):
            turn = len(_write(tokenizer, messages[:index], prompt=False))
            span, shorter = _dropped_thoughts(after, turn)
        if not (after.startswith(before) and text.startswith(shorter)):
            raise DataError(
                f"the chat template of {tokenizer.name_or_path!r} writes turn {index + 1} differently once more "
                "turns follow, so its answer has no fixed place. Use a template with {% generation %} blocks, "
                "or split the conversation into one sample an answer"
            )
        spans.append(span)
    return Rendered(text, tuple(spans))


def _dropped_thoughts(after: str, turn: int) -> tuple[tuple[int, int], str]:
    """The answer's span, and the text up to its end, in a conversation whose template omits the empty block of thoughts
    once more turns follow. after: the text up to the answer, as its last; turn: where its turn begins."""
    block = _EMPTY_THOUGHTS.search(after, turn)
    if block is None:
        return (turn, len(after)), after
    shorter = after[: block.start()] + after[block.end() :]
    return (block.start(), len(shorter)), shorter


def _without_empty_thoughts(rendered: Rendered, messages: list[Message]) -> Rendered:
    """Answers without the block that the template put before them: one that the sample itself has is its own."""
    answers = [_said(message) for message in messages if message["role"] == "assistant"]
    spans = []
    for number, (start, stop) in enumerate(rendered.spans):
        block = _AT_START.match(rendered.text, start, stop)
        own = answers[number : number + 1] if len(answers) == len(rendered.spans) else answers
        if block and not any(_AT_START.match(answer) for answer in own):
            start = min(block.end(), stop)
        spans.append((start, stop))
    return Rendered(rendered.text, tuple(spans))


def _said(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _takes_strings(tokenizer: PreTrainedTokenizerBase) -> bool:
    template = tokenizer.chat_template
    if template not in _OF_STRINGS:
        _OF_STRINGS[template] = takes_strings(lambda messages: _write(tokenizer, messages, prompt=False))
    return _OF_STRINGS[template]


def _write(tokenizer: PreTrainedTokenizerBase, messages: list[Message], prompt: bool) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)


MAX_BYTES = 1 << 20  # a template has some kilobytes; this is another file


def read_template(path: str | None) -> str | None:
    """The text of data.chat_template; None for None.

    Raises ConfigError for a file that is missing, no text, empty, or no Jinja."""
    if path is None:
        return None
    file = Path(path)
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(
                f"{_key(path)} has {file.stat().st_size} bytes, more than any template. Give a .jinja file"
            )
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_key(path)} is not UTF-8 text (byte {error.start}). Give a .jinja file") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{_key(path)} cannot be read: {reason}. Give a file with a Jinja template, as chat_template.jinja of a "
            f"model; relative paths start from {Path.cwd()}"
        ) from error
    if not text.strip():
        raise ConfigError(f"{_key(path)} is empty. Give a file with a Jinja template, or null for the model's own")
    _check_syntax(path, text)
    return text


def _check_syntax(path: str, text: str) -> None:
    """As transformers would, in its sandbox and with its own blocks. Nothing is rendered."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        _compile_jinja_template(text)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{_key(path)} is no Jinja template: line {error.lineno}: {error.message}") from error


def _key(path: str) -> str:
    return f"data.chat_template={path}"
