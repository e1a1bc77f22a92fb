"""One annotation in LLaVA format, checked: turns of text and images in the order of their `<image>` tags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhp.errors import DataError

ROLES = {"system": "system", "human": "user", "gpt": "assistant"}

# The newline that LLaVA writes between a tag and the text belongs to the tag, not to the question.
_TAG = re.compile(r"\n?<image>\n?")


@dataclass(frozen=True)
class Turn:
    """What one side says. role: system, user or assistant; parts: text (str) and images (absolute Path)."""

    role: str
    parts: tuple[str | Path, ...]


@dataclass(frozen=True)
class Record:
    """One conversation. position: its 1-based line or element; where: its place in words, for errors."""

    dataset: str
    position: int
    where: str
    turns: tuple[Turn, ...]

    @property
    def images(self) -> tuple[Path, ...]:
        """All images, in the order in which the conversation shows them."""
        return tuple(part for turn in self.turns for part in turn.parts if isinstance(part, Path))


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put the place `where` in front of a DataError raised inside."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def parse_record(raw: Any, dataset: str, position: int, where: str, data_path: Path | None) -> Record:
    """Check one raw annotation and resolve its images under data_path.

    DataError, with the reason alone, when keys or types are wrong, roles do not alternate, the last
    turn is not an answer, tags and images differ in number, or an image path leaves data_path.
    """
    if not isinstance(raw, dict):
        raise DataError(f"expected an object with 'conversations', got {type(raw).__name__}")
    if raw.get("video") is not None:
        raise DataError("'video' samples are not supported: only 'image' is")
    said = [_statement(number, entry) for number, entry in enumerate(_conversation(raw), start=1)]
    _check_order([role for role, _ in said])
    names = _image_names(raw)
    tags = sum(text.count("<image>") for role, text in said if role == "user")
    if tags != len(names):
        raise DataError(f"{tags} <image> tags in the human turns, but {len(names)} images: {names}")
    images = iter([_image_path(name, data_path) for name in names])
    turns = [Turn(role, _parts(text, images) if role == "user" else (text,)) for role, text in said]
    return Record(dataset, position, where, tuple(turns))


def _conversation(raw: dict[str, Any]) -> list[Any]:
    if "conversations" not in raw:
        raise DataError(f"key 'conversations' is missing; the sample has {sorted(raw)}")
    conversation = raw["conversations"]
    if not isinstance(conversation, list):
        raise DataError(f"'conversations' must be a list of turns, got {type(conversation).__name__}")
    if not conversation:
        raise DataError("'conversations' is empty")
    return conversation


def _statement(number: int, entry: Any) -> tuple[str, str]:
    """(role, text) of one raw turn. number: 1-based, for errors."""
    if not isinstance(entry, dict):
        raise DataError(f"turn {number} must be an object with 'from' and 'value', got {type(entry).__name__}")
    for key in ("from", "value"):
        if not isinstance(entry.get(key), str):
            raise DataError(f"turn {number}: {key!r} must be a string, got {entry.get(key)!r:.80}")
    if entry["from"] not in ROLES:
        raise DataError(f"turn {number}: unknown role {entry['from']!r}; known are {', '.join(ROLES)}")
    role, text = ROLES[entry["from"]], entry["value"]
    if role == "assistant" and not text.strip():
        raise DataError(f"turn {number}: the answer is empty, so there is nothing to learn from it")
    return role, text


def _check_order(roles: list[str]) -> None:
    spoken = roles[1:] if roles[0] == "system" else roles
    if "system" in spoken:
        raise DataError("a system turn can only be the first")
    if not spoken or spoken[0] != "user":
        raise DataError("the conversation must begin with a human turn (after an optional system turn)")
    for number, (role, following) in enumerate(zip(spoken, spoken[1:]), start=len(roles) - len(spoken) + 1):
        if role == following:
            raise DataError(f"turns {number} and {number + 1} are both from the {role}; roles must alternate")
    if spoken[-1] != "assistant":
        raise DataError("the last turn must be from gpt: nothing is learned after it otherwise")


def _image_names(raw: dict[str, Any]) -> list[str]:
    value = raw.get("image")
    names = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) and name for name in names):
        raise DataError(f"'image' must be a path or a list of paths, got {value!r:.80}")
    return names


def _image_path(name: str, data_path: Path | None) -> Path:
    """The absolute path of an image, links followed, refused outside data_path."""
    if data_path is None:
        raise DataError(f"image {name!r}, but the dataset has no data_path. Set data_path to its image folder")
    root = data_path.resolve()
    try:
        path = (root / name).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL byte
        raise DataError(f"image path {name!r} cannot be resolved: {error}") from error
    if not path.is_relative_to(root):
        raise DataError(f"image path {name!r} leaves data_path {root} (it leads to {path}); refused")
    return path


def _parts(text: str, images: Iterator[Path]) -> tuple[str | Path, ...]:
    """Text around the tags, with the next image in place of each tag."""
    parts: list[str | Path] = []
    for number, piece in enumerate(_TAG.split(text)):
        if number:
            parts.append(next(images))
        if piece:
            parts.append(piece)
    return tuple(parts)
