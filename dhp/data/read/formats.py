"""Converts rows of each format into dialogues with files."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from dhp.config.ranges import TURN_COLUMNS
from dhp.core.errors import DataError
from dhp.core.text import did_you_mean, nearest
from dhp.data.media.sources import PLAIN, MediaResolver, Settings
from dhp.data.read.dialogue import (
    Bare,
    Said,
    check_order,
    check_texts,
    optional_text,
    pairs_before,
    required_text,
    show,
    statements,
    with_system,
)
from dhp.data.read.records import ANSWERS, WRITES, Fields, Part, Turn, is_set

KINDS = ("image", "video", "audio")
# By whether it is kept: the newline that is written between a tag and the text belongs to the tag, or to the question.
_TAG = {False: r"\n?<(image|video|audio)>\n?", True: r"<(image|video|audio)>"}


@dataclass(frozen=True)
class SideFiles:
    """Files that a sample names outside its turns. files: by kind, in order. settings: of its videos."""

    files: Mapping[str, list[Any]]
    settings: Settings = PLAIN


def turns_of(raw: Fields, said: Sequence[Said], media: MediaResolver, in_front: bool = False) -> tuple[Turn, ...]:
    """Turns with the sample's files in place. Where a turn is a list of parts, files outside belong to the parts that
    name none, and a tag is text; so it is in any turn where no file is named outside. Else each tag of a question is
    the place of a file. in_front: files of a kind without any tag go before the first question.

    Raises DataError, with the reason alone, when numbers differ or roles do not alternate."""
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


def _files_beside(raw: Fields, said: Sequence[Said]) -> tuple[Sequence[Said], SideFiles]:
    files = {kind: _either(raw, kind) for kind in KINDS}
    if isinstance(raw.peek("image"), Mapping) and _is_numbered(raw["image"]):
        said, files["image"] = _numbered_tags(said, raw["image"])
    settings = PLAIN
    if raw.has("clip") and len(files["video"]) == 1:
        settings = _clip(raw["clip"])
    return said, SideFiles(files, settings)


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


def _in_front(said: Sequence[Said], beside: SideFiles) -> list[Said]:
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


def _at_tags(said: Sequence[Said], beside: SideFiles, keep_newlines: bool) -> list[Said]:
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


def _filled(said: Sequence[Said], beside: SideFiles, media: MediaResolver) -> list[Said]:
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
    parts: Sequence[Part | Bare], following: Mapping[str, Iterator[Any]], beside: SideFiles, media: MediaResolver
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
        "set to text; preferences are, where training.objective is one of theirs, and classes are not"
    )
