"""Keys of other trainers: translated where there is one of the same meaning, explained where there is none.

The table is data: `python -m dhp.config.vocabulary` prints it as the one in docs/reference/configuration.md.

`python -m dhp.config.vocabulary` prints the tables of docs/reference/coming-from.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from dhp.config.suggestions import nearest
from dhp.config.vocabulary_table import ENVIRONMENT, FOREIGN, Foreign
from dhp.core.errors import ConfigError

_ANY = object()  # any value; and, as what it becomes, the same value

Values = Mapping[str, Any]  # by dotted key


@dataclass(frozen=True)
class Alias:
    """One key of the other vocabulary, or one value of it.

    old: its dotted key. value: the row is about this value alone.

    new: the keys that take it here; none: it has no effect. to: the value they take.

    times: another key of the other vocabulary, whose value multiplies this one.

    why: why it has no effect, or a remark. instead: it is refused; what to write.
    """

    old: str
    new: tuple[str, ...] = ()
    value: Any = _ANY
    to: Any = _ANY
    times: str = ""
    why: str = ""
    instead: str = ""

    def fits(self, key: str, value: Any) -> bool:
        return key == self.old and (self.value is _ANY or (value == self.value and type(value) is type(self.value)))


def _both(*rows: Callable[[str], Alias]) -> Iterator[Alias]:
    for row in rows:
        yield from (row("vision"), row("text"))


_ONE_STEP = "training.micro_batch_size cuts a batch"
_LARGER = "a training.batch_size that many times as large, which training.micro_batch_size cuts"

# The first row that fits a key and its value decides.
ALIASES: tuple[Alias, ...] = (
    *_both(
        lambda part: Alias(f"{part}.model_type", why="the model's config.json says its type"),
        lambda part: Alias(f"{part}.dp_size", (f"{part}.data",), why="training.batch_size counts all replicas here"),
        lambda part: Alias(f"{part}.parallel_size", (f"{part}.num_actors",), times=f"{part}.dp_size"),
        lambda part: Alias(f"{part}.autocast", why=f"{part}.dtype is the format of everything"),
    ),
    Alias("text.autotp_size", ("text.tensor",)),
    Alias("text.tp_overlap_comm", why="PyTorch decides what overlaps"),
    Alias("training.num_iterations", ("training.max_steps",), times="training.num_epochs"),
    Alias("training.dp_size", ("vision.data", "text.data"), why="training.batch_size counts all replicas here"),
    Alias("training.parallel_size", ("vision.num_actors", "text.num_actors"), times="training.dp_size"),
    Alias("training.collocate", ("cluster.collocate",)),
    Alias("collocate", ("cluster.collocate",)),
    Alias("training.seed", ("seed",)),
    Alias("training.no_checkpoint", ("training.save_final",), True, False),
    Alias("training.no_checkpoint", ("training.save_final",), False, True),
    Alias("training.gradient_accumulation_steps", value=1, why=_ONE_STEP),
    Alias("training.gradient_accumulation_steps", instead=_LARGER),
    Alias("training.clip_grad_norm", ("training.max_grad_norm",), False, None),
    Alias("training.clip_grad_norm", why="training.max_grad_norm says it"),
    Alias("data.data_flatten", ("data.packing",)),
    Alias("data.force_fixed_size", value=False, why="images keep their shape"),
    Alias("data.force_fixed_size", instead="data.min_pixels and data.max_pixels alike: the area is fixed then"),
    Alias("deepspeed.reduce_bucket_size", why="the size of the buckets is fixed"),
    Alias("debug", why="logs of every actor are in run_dir"),
)


def has_alias(key: str, value: Any) -> bool:
    """Whether the table has a row for this key with this value."""
    return _row(key, value) is not None


def names_here(key: str) -> list[str]:
    """dhp's keys for a key of the other vocabulary; none when it is no such key, or has no effect here."""
    return sorted({new for row in ALIASES if row.old == key for new in row.new})


def translated(values: Values) -> tuple[dict[str, Any], list[str]]:
    """`values` in dhp's vocabulary, and a line for each that was of the other one.

    Raises ConfigError for what cannot be translated, and where two keys contradict each other.
    """
    given = {key: value for key, value in values.items() if not has_alias(key, value)}
    ours: dict[str, Any] = {}
    notices = []
    for row, value in _aliased(values):
        old = f"{row.old}={_shown(value)}"
        if row.instead:
            raise ConfigError(f"{old} is said in another way here. Write {row.instead}.")
        if not row.new or (value is None and row.to is _ANY):
            notices.append(f"{old} has no effect here: {row.why or 'null leaves the default'}")
            continue
        becomes = _becomes(row, value, values)
        fresh = {new: becomes for new in row.new if new not in ours}  # a part's own key beats training's for both
        if row.to is _ANY:
            _refuse_contradiction(old, fresh, given)
        ours |= fresh
        shown = " and ".join(f"{new}={_shown(becomes)}" for new in fresh) or "overruled by each part's own key"
        notices.append(f"{old} is {shown} here" + (f"; {row.why}" if row.why else ""))
    return given | ours, notices


def table() -> str:
    """The rows as a Markdown table."""
    lines = ["| there | here |", "|---|---|"]
    for row in ALIASES:
        old = f"`{row.old}" + ("" if row.value is _ANY else f"={_shown(row.value)}") + "`"
        lines.append(f"| {old} | {_meaning(row)} |")
    return "\n".join(lines) + "\n"


def _meaning(row: Alias) -> str:
    if row.instead:
        return f"refused; write {row.instead}"
    if not row.new:
        return f"no effect: {row.why}"
    value = "" if row.to is _ANY else f"={_shown(row.to)}"
    times = f", times `{row.times}`" if row.times else ""
    return ", ".join(f"`{new}{value}`" for new in row.new) + times + (f"; {row.why}" if row.why else "")


def _row(key: str, value: Any) -> Alias | None:
    return next((row for row in ALIASES if row.fits(key, value)), None)


def _aliased(values: Values) -> list[tuple[Alias, Any]]:
    """Rows that fit and their values, in the table's order: what a part says before what training says for both."""
    found = [(row, value) for key, value in values.items() if (row := _row(key, value)) is not None]
    return sorted(found, key=lambda pair: ALIASES.index(pair[0]))


def _becomes(row: Alias, value: Any, values: Values) -> Any:
    if row.to is not _ANY:
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
                f"{old} means {new}={_shown(becomes)} here, and {new}={_shown(given[new])} is given too. "
                f"Keep {new} alone."
            )


def _shown(value: Any) -> str:
    """A value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


if __name__ == "__main__":
    print(table(), end="")

HEADING = "## All keys"
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
    rows = {name: row for row in ENVIRONMENT for name in row.names}
    noticed = {name: row for name, row in rows.items() if environment.get(name)}
    return [f"{name} is set in the environment and has no effect; {_answer(row)}" for name, row in noticed.items()]


def tables() -> str:
    """Markdown from `## All keys` on: a table for each topic, that of environment variables last."""
    parts = [f"{HEADING}\n"]
    for topic, rows in {**FOREIGN, "Environment variables": ENVIRONMENT}.items():
        lines = ["| there | known from | here |", "|---|---|---|", *map(_line, rows)]
        parts.append(f"### {topic}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


@cache
def _rows() -> dict[str, Foreign]:
    return {name.lower(): row for rows in FOREIGN.values() for row in rows for name in row.names}


def _answer(row: Foreign) -> str:
    if not row.keys:
        return f"there is none: {row.say}"
    return f"here it is {' and '.join(row.keys)}" + (f" ({row.say})" if row.say else "")


def _line(row: Foreign) -> str:
    theirs = ", ".join(f"`{name}`" for name in row.names)
    known = ", ".join(TRAINERS[letter] for letter in row.of)
    here = ", ".join(f"`{key}`" for key in row.keys)
    said = re.sub(r"(?<!`)\b((?:training|data|text|vision|audio|cluster)\.[\w.]+\w(?:=\w+)?)", r"`\1`", row.say)
    return f"| {theirs} | {known} | {here + ('; ' if said else '') + said if here else f'– {said}'} |"


if __name__ == "__main__":
    print(tables(), end="")
