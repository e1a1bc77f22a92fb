"""Keys of a dataset's own under the names that the formats know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dhp.config.ranges import TURN_COLUMNS

_LISTS = ("messages", "conversations")


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


def _renamed(raw: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    kept = {key: value for key, value in raw.items() if key not in columns and key not in columns.values()}
    return kept | {ours: raw[theirs] for ours, theirs in columns.items() if theirs in raw}
