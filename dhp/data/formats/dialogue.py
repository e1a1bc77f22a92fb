"""What all formats share: statements with a role, their order, and tags in the text that stand for pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dhp.base.errors import DataError
from dhp.data.media.resolver import MediaResolver
from dhp.data.media.sources import Sound, Video
from dhp.data.records import Part, Turn

Said = tuple[str, str]  # role, text

# The newline that is written between a tag and the text belongs to the tag, not to the question.
_TAG = re.compile(r"\n?<(image|video)>\n?")
_TAG_WITH_SOUND = re.compile(r"\n?<(image|video|audio)>\n?")
SOUND_KEYS = ("audio", "audios")


def entries_of(raw: Mapping[str, Any], key: str) -> list[Any]:
    """The list of turns under `key`. Raises DataError when it is missing, of another type or empty."""
    if key not in raw:
        raise DataError(f"key {key!r} is missing; the sample has {sorted(map(str, raw))}")
    entries = raw[key]
    if not isinstance(entries, list):
        raise DataError(f"{key!r} must be a list of turns, got {type(entries).__name__}")
    if not entries:
        raise DataError(f"{key!r} is empty")
    return entries


def statement(number: int, entry: Any, keys: tuple[str, str], roles: Mapping[str, str]) -> Said:
    """(role, text) of one raw turn. number: 1-based, for errors. keys: of the role and of the text."""
    role_key, text_key = keys
    if not isinstance(entry, Mapping):
        kind = type(entry).__name__
        raise DataError(f"turn {number} must be an object with {role_key!r} and {text_key!r}, got {kind}")
    for key in keys:
        if not isinstance(entry.get(key), str):
            hint = _hint(entry.get(key))
            raise DataError(f"turn {number}: {key!r} must be a string, got {entry.get(key)!r:.80}{hint}")
    role = known_role(number, entry[role_key], roles)
    check_answer(number, role, entry[text_key])
    return role, entry[text_key]


def _hint(text: Any) -> str:
    return ". A list of parts is OpenAI's: set format=openai for this dataset" if isinstance(text, list) else ""


def known_role(number: int, role: str, roles: Mapping[str, str]) -> str:
    """system, user or assistant. Raises DataError for a role that the format does not have."""
    if role not in roles:
        raise DataError(f"turn {number}: unknown role {role!r}; known are {', '.join(roles)}")
    return roles[role]


def check_answer(number: int, role: str, text: str) -> None:
    """Raises DataError for an answer without text."""
    if role == "assistant" and not text.strip():
        raise DataError(f"turn {number}: the answer is empty, so there is nothing to learn from it")


def check_order(roles: Sequence[str]) -> None:
    """Questions and answers alternate, after one optional system turn. Raises DataError."""
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


def required_text(raw: Mapping[str, Any], key: str) -> str:
    """The text under `key`. Raises DataError where it is missing or of another type."""
    if raw.get(key) is None:
        raise DataError(f"key {key!r} is missing; the sample has {sorted(map(str, raw))}")
    return optional_text(raw, key)


def optional_text(raw: Mapping[str, Any], key: str) -> str:
    """The text under `key`; "" where there is none. Raises DataError for another type."""
    text = raw.get(key)
    if text is not None and not isinstance(text, str):
        raise DataError(f"{key!r} must be a string, got {text!r:.80}")
    return text or ""


def with_system(raw: Mapping[str, Any], said: Sequence[Said]) -> list[Said]:
    """What was said, after the text under `system` where there is one."""
    system = optional_text(raw, "system")
    return [("system", system), *said] if system else list(said)


def pairs_before(raw: Mapping[str, Any]) -> list[Said]:
    """Earlier questions and answers under `history`, a list of pairs. Raises DataError."""
    history = raw.get("history")
    if history is not None and not isinstance(history, list):
        raise DataError(f"'history' must be a list of pairs of question and answer, got {history!r:.80}")
    said = []
    for number, pair in enumerate(history or [], start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(f"'history' {number} must be a pair of question and answer, got {pair!r:.80}")
        check_answer(2 * number, "assistant", pair[1])
        said += [("user", pair[0]), ("assistant", pair[1])]
    return said


def listed(raw: Mapping[str, Any], key: str) -> list[Any]:
    """The files under `key`: one, or a list of them; none where the key is absent or null."""
    value = raw.get(key)
    names = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(name, (str, bytes, Mapping)) and name for name in names):
        raise DataError(f"{key!r} must be a path or a list of paths, got {value!r:.80}")
    return names


def listed_sounds(raw: Mapping[str, Any]) -> list[Any]:
    """The clips of a sample, under either key."""
    found = [listed(raw, key) for key in SOUND_KEYS]
    if all(found):
        raise DataError("both 'audio' and 'audios' name clips; name all of them under one")
    return found[0] or found[1]


def count_tags(said: Sequence[Said], kind: str) -> int:
    """`<image>`, `<video>` or `<audio>` tags in the human turns."""
    return sum(text.count(f"<{kind}>") for role, text in said if role == "user")


def tagged_turns(
    said: Sequence[Said],
    images: Sequence[Any],
    videos: Sequence[Any],
    media: MediaResolver,
    sounds: Sequence[Any] = (),
) -> tuple[Turn, ...]:
    """Turns with images, videos and sounds in place of their tags, in order; `<audio>` is a tag where there are any
    sounds, else text. Raises DataError when the numbers differ."""
    check_order([role for role, _ in said])
    shown = {"image": images, "video": videos, **({"audio": sounds} if sounds else {})}
    for kind, names in shown.items():
        tags = count_tags(said, kind)
        if tags != len(names):
            raise DataError(f"{tags} <{kind}> tags in the human turns, but {len(names)} {kind}s: {_brief(names)}")
    found = {
        "image": iter([media.find(name, "image") for name in images]),
        "video": iter([Video(media.find(name, "video")) for name in videos]),
        "audio": iter([Sound(media.find(name, "audio")) for name in sounds]),
    }
    tag = _TAG_WITH_SOUND if sounds else _TAG
    return tuple(Turn(role, _parts(text, found, tag) if role == "user" else (text,)) for role, text in said)


def _parts(text: str, media: Mapping[str, Iterator[Part]], tag: re.Pattern[str]) -> tuple[Part, ...]:
    """Text around the tags, with the next image, video or sound in place of each tag."""
    parts: list[Part] = []
    for number, piece in enumerate(tag.split(text)):
        if number % 2:
            parts.append(next(media[piece]))
        elif piece:
            parts.append(piece)
    return tuple(parts)


def _brief(names: Sequence[Any]) -> list[str]:
    return [name if isinstance(name, str) and len(name) <= 80 else f"{name!r:.60}…" for name in names[:8]]
