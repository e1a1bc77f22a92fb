"""Inserts files that a sample names outside its turns: at tags, at the parts that name none, or in front."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dhp.core.errors import DataError
from dhp.data.media.resolver import MediaResolver
from dhp.data.media.sources import PLAIN, Settings
from dhp.data.read.contents import Bare, show
from dhp.data.read.dialogue import Said, check_order, check_texts
from dhp.data.read.fields import Fields, is_set
from dhp.data.read.records import ANSWERS, Part, Turn

KINDS = ("image", "video", "audio")
# By whether it is kept: the newline that is written between a tag and the text belongs to the tag, or to the question.
_TAG = {False: r"\n?<(image|video|audio)>\n?", True: r"<(image|video|audio)>"}


@dataclass(frozen=True)
class Beside:
    """Files that a sample names outside its turns. files: by kind, in order. settings: of its videos."""

    files: Mapping[str, list[Any]]
    settings: Settings = PLAIN


def turns_of(raw: Fields, said: Sequence[Said], media: MediaResolver, in_front: bool = False) -> tuple[Turn, ...]:
    """Turns with the sample's files in place. Where a turn is a list of parts, files outside belong to the parts that
    name none, and a tag is text; so it is in any turn where no file is named outside. Else each tag of a question is
    the place of a file. in_front: files of a kind without any tag go before the first question.

    Raises DataError, with the reason alone, when numbers differ or roles do not alternate.
    """
    check_order([one.role for one in said])
    said, beside = _files_beside(raw, said)
    if not all(one.tagged for one in said):
        placed = said
    else:
        placed = _at_tags(_in_front(said, beside) if in_front else said, beside, media.keep_newlines)
    filled = _filled(placed, beside, media)
    turns = [Turn(one.role, _joined(number, one), one.learned, one.thoughts) for number, one in enumerate(filled, 1)]
    check_texts(filled)
    return tuple(turns)


def count_tags(said: Sequence[Said], kind: str) -> int:
    """`<image>`, `<video>` or `<audio>` tags in the questions."""
    return sum(one.text.count(f"<{kind}>") for one in said if one.role == "user")


def _files_beside(raw: Fields, said: Sequence[Said]) -> tuple[Sequence[Said], Beside]:
    files = {kind: _either(raw, kind) for kind in KINDS}
    if isinstance(raw.peek("image"), Mapping) and _is_numbered(raw["image"]):
        said, files["image"] = _numbered_tags(said, raw["image"])
    settings = PLAIN
    if raw.has("clip") and len(files["video"]) == 1:
        settings = _clip(raw["clip"])
    return said, Beside(files, settings)


def _either(raw: Fields, kind: str) -> list[Any]:
    one, several = _listed(raw, kind), _listed(raw, f"{kind}s")
    if one and several:
        what = "clips" if kind == "audio" else "files"
        raise DataError(f"both {kind!r} and '{kind}s' name {what}; name all of them under one")
    return one or several


def _listed(raw: Fields, key: str) -> list[Any]:
    """The files under `key`: one, or a list of them; none where the key is absent, null or empty. A video may be a
    list of its frames."""
    value = raw.get(key)
    names = [] if value is None or value == "" else value if isinstance(value, list) else [value]
    kinds = (str, bytes, Mapping, list) if key == "videos" else (str, bytes, Mapping)
    if not all(isinstance(name, kinds) and name for name in names):
        raise DataError(f"{key!r} must be a path or a list of paths, got {value!r:.80}")
    return names if is_set(names) or any(isinstance(name, Mapping) for name in names) else []


def _is_numbered(value: Mapping[str, Any]) -> bool:
    return bool(value) and all(re.fullmatch(r"<[\w-]+>", str(name)) for name in value)


def _numbered_tags(said: Sequence[Said], names: Mapping[str, Any]) -> tuple[list[Said], list[Any]]:
    """MiniCPM-V's tags with numbers, `<image_00>`, as tags without; and the files in the order of the tags."""
    tags = re.compile("|".join(map(re.escape, names)))
    order = [tag for one in said if one.role == "user" for tag in tags.findall(one.text)]
    if sorted(order) != sorted(names):
        raise DataError(f"tags {sorted(names)} of 'image' must each stand once in the questions, which have {order}")
    plain: Callable[[Said], tuple[Part | Bare, ...]] = lambda one: tuple(
        tags.sub("<image>", part) if isinstance(part, str) else part for part in one.parts
    )
    shown = [replace(one, parts=plain(one)) if one.role == "user" else one for one in said]
    return shown, [names[tag] for tag in order]


def _clip(value: Any) -> Settings:
    numbers = isinstance(value, list | tuple) and all(isinstance(one, int | float) for one in value)
    if not numbers or len(value) != 2 or not 0 <= value[0] < value[1]:
        raise DataError(f"'clip' must be [start, end] in seconds, got {value!r:.40}")
    return Settings(start=value[0], end=value[1])


def _in_front(said: Sequence[Said], beside: Beside) -> list[Said]:
    """Tags before the first question, of the kinds that have files and none."""
    missing = [kind for kind, found in beside.files.items() if found and not count_tags(said, kind)]
    for kind in missing:
        if any(f"<{kind}>" in one.text for one in said if one.role == ANSWERS):
            raise DataError(
                f"an answer has the tag <{kind}>, and no question has: pictures are not generated here. Put the tag "
                "into the question that shows it"
            )
    tags = "".join(f"<{kind}>" * len(beside.files[kind]) for kind in missing)
    first = next((number for number, one in enumerate(said) if one.role == "user"), None)
    return [replace(one, parts=(tags, *one.parts)) if tags and n == first else one for n, one in enumerate(said)]


def _at_tags(said: Sequence[Said], beside: Beside, keep_newlines: bool) -> list[Said]:
    """Places of files instead of tags. Without a sound, `<audio>` is text."""
    for kind, names in beside.files.items():
        tags = count_tags(said, kind)
        if tags != len(names) and (kind != "audio" or names):
            hint = "" if tags else ". Set format: swift for this dataset, and they stand before the first question"
            raise DataError(f"{tags} <{kind}> tags in the human turns, but {len(names)} {kind}s: {_brief(names)}{hint}")
    read = [kind for kind in KINDS if kind != "audio" or beside.files[kind]]
    tag = re.compile(_TAG[keep_newlines] if "audio" in read else _TAG[keep_newlines].replace("|audio", ""))
    return [replace(one, parts=_cut(one.text, tag)) if one.role == "user" else one for one in said]


def _cut(text: str, tag: re.Pattern[str]) -> tuple[Part | Bare, ...]:
    """Text split at tags, with a place of a file for each."""
    parts: list[Part | Bare] = []
    for number, piece in enumerate(tag.split(text)):
        if number % 2:
            parts.append(Bare(piece))
        elif piece:
            parts.append(piece)
    return tuple(parts)


def _filled(said: Sequence[Said], beside: Beside, media: MediaResolver) -> list[Said]:
    """Insert files at their places. Raises DataError where their numbers differ."""
    for kind, names in beside.files.items():
        bare = sum(isinstance(part, Bare) and part.kind == kind for one in said for part in one.parts)
        if bare != len(names):
            raise DataError(
                f"{bare} parts of type {kind} that name no file, but {len(names)} {kind}s beside the turns: "
                f"{_brief(names)}. Each file beside needs such a part, in order"
            )
    following = {kind: iter(names) for kind, names in beside.files.items()}
    return [replace(one, parts=tuple(_fill(one.parts, following, beside, media))) for one in said]


def _fill(
    parts: Sequence[Part | Bare], following: Mapping[str, Iterator[Any]], beside: Beside, media: MediaResolver
) -> Iterator[Part]:
    for part in parts:
        if isinstance(part, Bare):
            settings = beside.settings if part.kind == "video" and part.settings == PLAIN else part.settings
            yield show(part.kind, next(following[part.kind]), media, settings)
        else:
            yield part


def _joined(number: int, one: Said) -> tuple[Part, ...]:
    """The parts of a turn; of all but a question one text. Raises DataError for a file there."""
    if one.role == "user":
        return one.parts  # type: ignore[return-value]
    if not all(isinstance(part, str) for part in one.parts):
        raise DataError(
            f"turn {number}: images, videos and sound can only be in user turns, not in one from the {one.role}"
        )
    return (one.text,)


def _brief(names: Sequence[Any]) -> list[str]:
    return [name if isinstance(name, str) and len(name) <= 80 else f"{name!r:.60}…" for name in names[:8]]
