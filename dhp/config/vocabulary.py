"""Translates or explains keys of other trainers.

The tables are data, in vocabulary.yaml beside this file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dhp.core.errors import ConfigError
from dhp.core.text import nearest

ANY = object()  # any value; and, as what it becomes, the same value

Values = Mapping[str, Any]  # by dotted key


@dataclass(frozen=True)
class Alias:
    """One key of the other vocabulary, or one value of it.

    old: its dotted key. value: the row is about this value alone.

    new: the keys that take it here; none: it has no effect. to: the value they take.

    times: another key of the other vocabulary, whose value multiplies this one.

    why: why it has no effect, or a remark. instead: it is refused; what to write."""

    old: str
    new: Sequence[str] = ()
    value: Any = ANY
    to: Any = ANY
    times: str = ""
    why: str = ""
    instead: str = ""

    def fits(self, key: str, value: Any) -> bool:
        return key == self.old and (self.value is ANY or (value == self.value and type(value) is type(self.value)))


@dataclass(frozen=True)
class Foreign:
    """One key of other trainers, or several of one meaning. names: theirs. of: letters of the trainers. keys: ours;
    none: there is no such key. say: what to bear in mind, or why there is none."""

    names: Sequence[str]
    of: str
    keys: Sequence[str] = ()
    say: str = ""


@dataclass(frozen=True)
class Vocabulary:
    """The tables. aliases: the first row that fits a key and its value decides. foreign: by topic."""

    aliases: tuple[Alias, ...]
    foreign: Mapping[str, tuple[Foreign, ...]]
    environment: tuple[Foreign, ...]


@cache
def vocabulary() -> Vocabulary:
    """The tables of vocabulary.yaml."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    found = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return Vocabulary(
        tuple(Alias(**row) for row in found["aliases"]),
        {topic: tuple(Foreign(**row) for row in rows) for topic, rows in found["foreign"].items()},
        tuple(Foreign(**row) for row in found["environment"]),
    )


def has_alias(key: str, value: Any) -> bool:
    """Whether the table has a row for this key with this value."""
    return _row(key, value) is not None


def names_here(key: str) -> list[str]:
    """dhp's keys for a key of the other vocabulary; none when it is no such key, or has no effect here."""
    return sorted({new for row in vocabulary().aliases if row.old == key for new in row.new})


def translated(values: Values) -> tuple[dict[str, Any], list[str]]:
    """`values` in dhp's vocabulary, and a line for each that was of the other one.

    Raises ConfigError for what cannot be translated, and where two keys contradict each other."""
    given = {key: value for key, value in values.items() if not has_alias(key, value)}
    ours: dict[str, Any] = {}
    notices = []
    for row, value in _aliased(values):
        old = f"{row.old}={shown_value(value)}"
        if row.instead:
            raise ConfigError(f"{old} is said in another way here. Write {row.instead}.")
        if not row.new or (value is None and row.to is ANY):
            notices.append(f"{old} has no effect here: {row.why or 'null leaves the default'}")
            continue
        becomes = _becomes(row, value, values)
        fresh = {new: becomes for new in row.new if new not in ours}  # a part's own key beats training's for both
        if row.to is ANY:
            _refuse_contradiction(old, fresh, given)
        ours |= fresh
        shown = " and ".join(f"{new}={shown_value(becomes)}" for new in fresh) or "overruled by each part's own key"
        notices.append(f"{old} is {shown} here" + (f"; {row.why}" if row.why else ""))
    return given | ours, notices


def _row(key: str, value: Any) -> Alias | None:
    return next((row for row in vocabulary().aliases if row.fits(key, value)), None)


def _aliased(values: Values) -> list[tuple[Alias, Any]]:
    """Rows that fit and their values, in the table's order: what a part says before what training says for both."""
    found = [(row, value) for key, value in values.items() if (row := _row(key, value)) is not None]
    return sorted(found, key=lambda pair: vocabulary().aliases.index(pair[0]))


def _becomes(row: Alias, value: Any, values: Values) -> Any:
    if row.to is not ANY:
        return row.to
    factor = values.get(row.times, 1)
    if factor in (None, 1):
        return value
    if not (isinstance(value, int) and isinstance(factor, int)):
        raise ConfigError(f"{row.old}={value} × {row.times}={factor} is no whole number; give whole numbers for both")
    return value * factor


def _refuse_contradiction(old: str, fresh: Values, given: Values) -> None:
    for new, becomes in fresh.items():
        if new in given and given[new] != becomes:
            raise ConfigError(
                f"{old} means {new}={shown_value(becomes)} here, and {new}={shown_value(given[new])} is given too. "
                f"Keep {new} alone."
            )


def shown_value(value: Any) -> str:
    """A value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


TRAINERS = {"L": "LLaMA-Factory", "S": "ms-swift", "T": "transformers", "M": "others"}


def foreign_hint(path: str) -> str:
    """The hint for a key of other trainers, by its last name; empty when it is not known."""
    row = _rows().get(path.rpartition(".")[2].lower())
    return "" if row is None else f"; {_answer(row)}"


def mistyped_hint(path: str) -> str:
    """The hint for a key that is nearly one of another trainer's."""
    name = nearest(path.rpartition(".")[2].lower(), _rows())
    if name is None:
        return ""
    known = " and ".join(TRAINERS[letter] for letter in _rows()[name].of if letter != "M") or "other trainers"
    return f"; did you mean {name} of {known}? {_answer(_rows()[name])}"


def environment_notes(environment: Mapping[str, str]) -> list[str]:
    """A line for each variable that is set, that another trainer reads and that has no effect here."""
    rows = {name: row for row in vocabulary().environment for name in row.names}
    noticed = {name: row for name, row in rows.items() if environment.get(name)}
    return [f"{name} is set in the environment and has no effect; {_answer(row)}" for name, row in noticed.items()]


@cache
def _rows() -> dict[str, Foreign]:
    return {name.lower(): row for rows in vocabulary().foreign.values() for row in rows for name in row.names}


def _answer(row: Foreign) -> str:
    if not row.keys:
        return f"there is none: {row.say}"
    return f"here it is {' and '.join(row.keys)}" + (f" ({row.say})" if row.say else "")
