"""Renames a dataset's own keys to the names that the formats know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dhp.base.errors import DataError
from dhp.config.nearest import did_you_mean, nearest
from dhp.config.ranges import TURN_COLUMNS

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
