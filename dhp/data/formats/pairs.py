"""One question and its answer, under the names that are usual for them, as texts or as lists of turns."""

from __future__ import annotations

from dhp.base.errors import DataError
from dhp.data.formats.dialogue import Said, optional_text, pairs_before, statements
from dhp.data.formats.fields import Fields
from dhp.data.media.resolver import MediaResolver
from dhp.data.records import ANSWERS

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
