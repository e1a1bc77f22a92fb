"""Splits rows of preferences into ordinary rows, one for each side.

Formats: TRL's (prompt, chosen, rejected; prompt, completion, label), LLaMA-Factory's (a conversation, chosen, rejected;
kto_tag) and ms-swift's (a conversation, rejected_response or rejected_messages, rejected_images; label)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from dhp.core.errors import DataError
from dhp.core.preferences import SINGLES
from dhp.data.read.formats import ANSWER_KEYS
from dhp.data.read.records import ANSWERS, Record, Turn, is_set

_LISTS = {"messages": ("role", "content", "assistant"), "conversations": ("from", "value", "gpt")}
_ANSWERS = ("response", "completion", "output")
_ROLES = ("assistant", "gpt", "model")
_LABELS = ("label", "kto_tag")
_FILES = tuple(f"{kind}{s}" for kind in ("image", "video", "audio") for s in ("", "s"))


class Sides(NamedTuple):
    """Rows as those of fine-tuning. liked: of a single answer, whether it is; None: `second` is the worse one. turns:
    of the single answer."""

    first: dict[str, Any]
    second: dict[str, Any] | None
    liked: bool | None = None
    turns: int = 1


def split_sides(raw: Mapping[str, Any], compares: str) -> Sides:
    """Raises DataError, with the reason alone, for a row that is no preference, or lacks a side."""
    return _split_single(raw) if compares == SINGLES else _split_pair(raw)


def _split_pair(raw: Mapping[str, Any]) -> Sides:
    there = {key: value for key, value in raw.items() if is_set(value)}
    rejected = [key for key in there if key == "rejected" or key.startswith("rejected_")]
    files = {key: raw[f"rejected_{key}"] for key in _FILES if f"rejected_{key}" in rejected}
    if "chosen_messages" in there and "rejected_messages" in there:  # LLaMA-Factory's newer form
        base = {key: value for key, value in raw.items() if key not in ("chosen_messages", *rejected)}
        sides = tuple(base | {"messages": there[f"{side}_messages"]} for side in ("chosen", "rejected"))
    elif "chosen" in there or "rejected" in there:
        missing = [key for key in ("chosen", "rejected") if key not in there]
        if missing:
            raise DataError(f"{missing[0]!r} is missing or empty: a preference has two sides. Leave such rows out")
        base = {key: value for key, value in raw.items() if key not in ("chosen", *rejected)}
        sides = _with_answer(base, there["chosen"], "chosen"), _with_answer(base, there["rejected"], "rejected")
    elif answers := [key for key in ("rejected_response", "rejected_messages") if key in there]:
        first = {key: value for key, value in raw.items() if key not in rejected}
        sides = first, _instead(first, answers[0], there[answers[0]])
    else:
        raise DataError(
            f"no preference: the row has {sorted(map(str, raw))}, and neither 'chosen' and 'rejected' nor "
            "'rejected_response' or 'rejected_messages'. Leave it out, or train with training.objective="
            f"{'kto' if any(key in there for key in _LABELS) else 'sft'}"
        )
    second = sides[1] | files
    if sides[0] == second:
        raise DataError("both sides are the same, so that nothing is preferred. Leave such rows out")
    return Sides(sides[0], second)


def _split_single(raw: Mapping[str, Any]) -> Sides:
    labels = [key for key in _LABELS if key in raw and raw[key] is not None]
    if len(labels) != 1 or str(raw[labels[0]]).lower() not in ("true", "false", "1", "0"):
        there = ", ".join(f"{key}={raw[key]}" for key in _LABELS if key in raw) or sorted(map(str, raw))
        raise DataError(
            f"training.objective=kto needs one of {' and '.join(map(repr, _LABELS))}, true or false; the row has "
            f"{there}. Correct the row, or train pairs with training.objective=dpo"
        )
    row, turns = {key: value for key, value in raw.items() if key != labels[0]}, 1
    empty = [key for key in _ANSWERS if key in row and not is_set(row[key])]
    if empty and not any(is_set(row.get(key)) for key in (*ANSWER_KEYS, *_LISTS, "conversation", "texts")):
        raise DataError(f"its answer, {empty[0]!r}, is empty. Leave such rows out")
    if isinstance(row.get("completion"), list):
        turns = len(row["completion"])
        row = _with_answer(
            {key: value for key, value in row.items() if key != "completion"}, row["completion"], "completion"
        )
    return Sides(row, None, str(raw[labels[0]]).lower() in ("true", "1"), turns)


def compared(first: Record, second: Record | None, turns: int) -> tuple[Record, Record | None]:
    """Both with what is compared alone for learned: the turns of the single answer; of a pair, what stands behind the
    turns that both sides have. Raises DataError, with the reason alone, where the sides do not answer one question."""
    if second is None:
        return _behind(first, len(first.turns) - turns), None
    least = min(len(first.turns), len(second.turns)) - 1
    pairs = zip(first.turns[:least], second.turns[:least])
    same = next((at for at, (one, other) in enumerate(pairs) if _said(one) != _said(other)), least)
    roles = {record.turns[same].role for record in (first, second)}
    if roles != {ANSWERS}:
        raise DataError(
            f"turn {same + 1} of both sides differs, and is {' and '.join(sorted(roles))}: they answer different "
            "questions. A preference is of two answers to one; leave such rows out"
        )
    return _behind(first, same), _behind(second, same)


def split_answer(record: Record) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
    """Turns of the question of a single answer, and of the answer."""
    learned = (at for at, turn in enumerate(record.turns) if turn.role == ANSWERS and turn.learned)
    first = next(learned, len(record.turns) - 1)
    return record.turns[:first], record.turns[first:]


def _said(turn: Turn) -> tuple[str, str]:
    """Without pictures, which a side may have others of."""
    return turn.role, "".join(part for part in turn.parts if isinstance(part, str))


def _behind(record: Record, first: int) -> Record:
    """The record with no answer learned before its turn `first`."""
    turns = (replace(turn, learned=turn.learned and at >= first) for at, turn in enumerate(record.turns))
    return replace(record, turns=tuple(turns))


def _with_answer(row: dict[str, Any], answer: Any, side: str) -> dict[str, Any]:
    """The row with an answer behind its conversation: text, a turn, or turns, which may be the whole conversation."""
    key = next((key for key in _LISTS if is_set(row.get(key))), None)
    if isinstance(answer, str):
        if key is None and not isinstance(row.get("prompt"), list):
            return row | {"output" if is_set(row.get("instruction")) else "response": answer}
        names = _LISTS[key or "messages"]
        answer = {names[0]: names[2], names[1]: answer}
    if isinstance(answer, Mapping):
        answer = [answer]
    if not isinstance(answer, list):
        raise DataError(f"{side!r} must be a text, a turn or a list of turns, got {type(answer).__name__}")
    if key is not None:
        return row | {key: [*row[key], *answer]}
    asked = row.get("prompt")
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    rest = {name: value for name, value in row.items() if name != "prompt"}
    return rest | {"messages": [*(asked or []), *answer]}


def _instead(row: dict[str, Any], key: str, answer: Any) -> dict[str, Any]:
    """ms-swift's second side: other messages, or another text of the last answer."""
    if key == "rejected_messages":
        return row | {"messages": answer}
    held = next((name for name in _LISTS if is_set(row.get(name))), None)
    if held is None:
        own = next((name for name in _ANSWERS if is_set(row.get(name))), None)
        if own is None:
            raise DataError(f"'rejected_response' beside no answer; the row has {sorted(map(str, row))}")
        return row | {own: answer}
    role, text, _ = _LISTS[held]
    turns = row[held]
    if not isinstance(turns, list) or not turns or turns[-1].get(role) not in _ROLES:
        raise DataError(f"'rejected_response' needs {held!r} to end with an answer, in whose place it stands")
    return row | {held: [*turns[:-1], {**turns[-1], text: answer}]}
