"""The formats of rows: OpenAI, LLaVA, ShareGPT, Alpaca, ms-swift, pairs, plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from dhp.config.ranges import TURN_COLUMNS
from dhp.config.suggestions import did_you_mean, nearest
from dhp.core.errors import DataError
from dhp.data.media.resolver import MediaResolver
from dhp.data.read.attachments import count_tags, turns_of
from dhp.data.read.dialogue import Said, optional_text, pairs_before, required_text, statements, with_system
from dhp.data.read.fields import Fields
from dhp.data.read.records import ANSWERS, WRITES, Turn

_LISTS = ("messages", "conversations", "conversation")


def renamed(raw: Any, columns: Mapping[str, str]) -> Any:
    """A raw sample with our names for its keys. columns: our name → the sample's, of keys of the sample and of each of
    its turns. Other keys stay as they are, but for one that has our name and is not meant."""
    if not columns or not isinstance(raw, Mapping):
        return raw
    of_turns = {ours: theirs for ours, theirs in columns.items() if ours in TURN_COLUMNS}
    of_sample = {ours: theirs for ours, theirs in columns.items() if ours not in of_turns}
    sample = _renamed(raw, of_sample)
    for key in _LISTS if of_turns else ():
        if isinstance(sample.get(key), list):
            sample[key] = [_renamed(turn, of_turns) if isinstance(turn, Mapping) else turn for turn in sample[key]]
    return sample


def check_columns(samples: Sequence[Any], columns: Mapping[str, str]) -> None:
    """Raises DataError, with the reason alone, for a key of `columns` that none of these raw samples has."""
    rows = [raw for raw in samples if isinstance(raw, Mapping)]
    keys = {str(key) for raw in rows for key in raw}
    in_turns = {str(key) for turn in _turns(rows, columns) for key in turn}
    for ours, theirs in columns.items():
        there = in_turns if ours in TURN_COLUMNS else keys
        if theirs not in there:
            what = "no turn" if ours in TURN_COLUMNS else "none"
            raise DataError(
                f"columns={{{ours}: {theirs}}}, but {what} of the first {len(samples)} samples has {theirs!r}; they "
                f"have {sorted(there)}{did_you_mean([nearest(theirs, there)])}"
            )


def _turns(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
    for raw in rows:
        for key in _LISTS:
            turns = raw.get(columns.get(key, key))
            yield from (turn for turn in (turns if isinstance(turns, list) else ()) if isinstance(turn, Mapping))


def _renamed(raw: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    kept = {key: value for key, value in raw.items() if key not in columns and key not in columns.values()}
    return kept | {ours: raw[theirs] for ours, theirs in columns.items() if theirs in raw}


def read_openai(raw: Fields, media: MediaResolver) -> tuple[Turn, ...]:
    """The turns of a raw sample; where it names no file outside them, a tag is text. Raises DataError, with the reason
    alone."""
    said = with_system(raw, statements(raw, "messages", ("role", "content"), media))
    if not raw.has(*(f"{kind}{s}" for kind in ("image", "video", "audio") for s in ("", "s"))):
        said = [replace(one, tagged=False) for one in said]
    return turns_of(raw, said, media)


def read_llava(raw: Fields, media: MediaResolver) -> tuple[Turn, ...]:
    """The turns of a raw sample. Raises DataError, with the reason alone."""
    said = with_system(raw, statements(raw, "conversations", ("from", "value"), media))
    shows_images, shows_videos = raw.has("image", "images"), raw.has("video", "videos")
    if shows_videos and not shows_images and not count_tags(said, "video"):
        # LLaVA's own video sets write <image> where the video is.
        said = [
            replace(one, parts=(one.text.replace("<image>", "<video>"),)) if one.role == "user" and one.tagged else one
            for one in said
        ]
    return turns_of(raw, said, media)


def read_sharegpt(raw: Fields, media: MediaResolver) -> tuple[Turn, ...]:
    """The turns of a raw sample. Raises DataError, with the reason alone."""
    old = "conversations" in raw and "messages" not in raw
    key, names = ("conversations", ("from", "value")) if old else ("messages", ("role", "content"))
    return turns_of(raw, with_system(raw, statements(raw, key, names, media)), media)


def read_alpaca(raw: Fields, media: MediaResolver) -> tuple[Turn, ...]:
    """The turns of a raw sample: the question is the instruction, and below it the input where there is one. Raises
    DataError, with the reason alone."""
    instruction, more = optional_text(raw, "instruction"), optional_text(raw, "input")
    question = "\n".join(text for text in (instruction, more) if text)
    if not question:
        raise DataError(f"'instruction' is missing or empty; the sample has {sorted(map(str, raw))}")
    said = [*pairs_before(raw), Said("user", (question,)), Said(ANSWERS, (required_text(raw, "output"),))]
    return turns_of(raw, with_system(raw, said), media, in_front=True)


# Ours come first: where `columns` names one, the others are not asked.
QUESTIONS = ("query", "prompt", "question", "problem", "instruction", "input")
ANSWER_KEYS = ("response", "answer", "completion", "solution", "output")


def read_pair(raw: Fields, media: MediaResolver) -> list[Said]:
    """The turns of a row with a question and an answer. `input` follows the question, on a line of its own. Raises
    DataError for a row without an answer, or with several that it may be."""
    asked, answered = _named(raw, QUESTIONS), _named(raw, ANSWER_KEYS)
    if answered is None:
        raise DataError(f"key 'response' is missing; the sample has {sorted(map(str, raw))}")
    said: list[Said] = []
    for key, role in ((asked, "user"), (answered, ANSWERS)):
        if key is not None and isinstance(raw.get(key), list):
            said += statements(raw, key, ("role", "content"), media)
        else:
            said.append(Said(role, (_text(raw, key),)))
    return [*pairs_before(raw), *said]


def is_pair(raw: Fields) -> bool:
    """Whether a row has a question and an answer. Takes no key."""
    return raw.has(*QUESTIONS) and raw.has(*ANSWER_KEYS)


def _named(raw: Fields, keys: tuple[str, ...]) -> str | None:
    """The key that is meant. Raises DataError where several are set and none of them is ours."""
    there = [key for key in keys if raw.has(key)]
    if keys[0] in there:
        return keys[0]
    if "input" in there and len(there) > 1:
        there.remove("input")
    if len(there) > 1:
        raise DataError(
            f"{' and '.join(map(repr, there))} may each be the {keys[0]}; set the dataset's columns, as "
            f"columns={{{keys[0]}: {there[-1]}}}"
        )
    return there[0] if there else None


def _text(raw: Fields, key: str | None) -> str:
    text = "" if key is None else optional_text(raw, key)
    below = optional_text(raw, "input") if key in QUESTIONS[:-1] else ""
    return "\n".join(part for part in (text, below) if part)


_SWIFT_LISTS = {
    "messages": ("role", "content"),
    "conversations": ("from", "value"),
    "conversation": ("human", "assistant"),
    "texts": ("user", "assistant"),
}


def read_swift(raw: Fields, media: MediaResolver) -> tuple[Turn, ...]:
    """The turns of a raw sample. Raises DataError, with the reason alone."""
    return turns_of(raw, with_system(raw, _said(raw, media)), media, in_front=True)


def _said(raw: Fields, media: MediaResolver) -> list[Said]:
    for key, names in _SWIFT_LISTS.items():
        if raw.has(key):
            return statements(raw, key, names, media)
    return read_pair(raw, media)


def read_text(raw: Fields, media: MediaResolver) -> tuple[Turn, ...]:
    """The one turn of a raw sample, which no chat template writes. Raises DataError, with the reason alone."""
    text = required_text(raw, "text")
    if not text.strip():
        raise DataError("'text' is empty")
    return (Turn(WRITES, (text,)),)


KNOWN = {
    "llava": "conversations of from and value, image",
    "sharegpt": "messages of role and content, images",
    "openai": "messages whose content is a list of parts",
    "alpaca": "instruction, input and output",
    "swift": "query and response (or prompt, question, problem, instruction and answer, completion, solution), "
    "messages, conversation or texts of user and assistant, images",
    "text": "text",
}


def read_unknown(raw: Fields, media: MediaResolver) -> NoReturn:
    """Raises DataError that lists the formats."""
    if len(raw) == 1 and ";" in str(next(iter(raw))):
        raise DataError(
            f"the one column is {next(iter(raw))!r:.200}: the file is separated by semicolons. Write it with commas, "
            "or with tabs as .tsv"
        )
    known = "; ".join(f"{name} ({keys})" for name, keys in KNOWN.items())
    raise DataError(
        f"keys {sorted(map(str, raw))} are of no known format. Known are: {known}. If only names differ, say so in "
        "the dataset's columns, as columns={messages: dialogue}. Text alone is read only where the dataset's format is "
        "set to text; preferences and classes are not read"
    )
