"""Reads a dialogue's turns: roles, order, parts, targets."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dhp.core.errors import DataError
from dhp.data.media.sources import PLAIN, Frames, MediaResolver, Settings, SizedImage, Sound, Video
from dhp.data.read.records import ANSWERS, PART, TOOLS, TURN, Fields, Part, is_set

_TEXT = ("text", "input_text", "output_text")
_THOUGHT_KINDS = ("reasoning", "thinking")
_CALL_KINDS = (
    "tool_use",
    "tool_call",
    "tool_calls",
    "tool_result",
    "tool_response",
    "tool",
    "function",
    "function_call",
)
KINDS = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
}
_NAMED = ("path", "url", "base64", "value", "source", "file")  # where a part names its file, besides its own type
_FRAME_RATE = 2.0  # of a list of frames, as qwen_vl_utils has it
_FRACTIONS = ("fps", "video_start", "video_end", "sample_fps", "raw_fps")  # the other numbers are whole
_NUMBERS = {
    "min_pixels": "min_pixels", "max_pixels": "max_pixels", "fps": "fps", "nframes": "frames",
    "max_frames": "max_frames", "video_start": "start", "video_end": "end",
}  # fmt: skip


@dataclass(frozen=True)
class Bare:
    """A part that names no file: it gets the next one that is named outside the turns. kind: image, video or audio."""

    kind: str
    settings: Settings = PLAIN


@dataclass(frozen=True)
class Thoughts:
    """A part with what was reasoned."""

    text: str


def read_parts(number: int, content: list[Any], turn: Fields, media: MediaResolver) -> list[Part | Bare | Thoughts]:
    """The parts of a turn, files found. number: of the turn, 1-based. Raises DataError, with the reason alone."""
    return [_part(number, part, turn, media) for part in content]


def show(kind: str, value: Any, media: MediaResolver, settings: Settings = PLAIN, rate: float | None = None) -> Part:
    """A picture, video or clip by what a row calls it. kind: image, video or audio. rate: frames a second where the
    value is a list of them. Raises DataError."""
    if kind == "audio":
        return Sound(media.find(value, kind))
    if kind == "image":
        file = media.find(value, kind)
        return file if settings == PLAIN else SizedImage(file, settings)
    if isinstance(value, list | tuple):
        if not value:
            raise DataError("a video as a list of frames needs some; this list is empty")
        return Video(Frames(tuple(media.find(one, "image") for one in value), rate or _FRAME_RATE), settings)
    return Video(media.find(value, kind), settings)


def _part(number: int, raw: Any, turn: Fields, media: MediaResolver) -> Part | Bare | Thoughts:
    place = f"turn {number}"
    known = ", ".join(("text", *KINDS))
    kind = raw.get("type") if isinstance(raw, Mapping) else None
    if kind in _CALL_KINDS:
        raise DataError(f"{place}: a part of type {kind}: {TOOLS}")
    if not isinstance(kind, str) or kind not in (*_TEXT, *_THOUGHT_KINDS, *KINDS):
        raise DataError(f"{place}: a part must be an object of type {known}, got {raw!r:.80}")
    part = turn.within(raw, PART, place, "'type'")
    part.get("type")
    if kind in KINDS:
        return _shown(number, part, raw, media)
    text = part.get(part.first("text", kind, "value", "content") or "text")
    if not isinstance(text, str):
        raise DataError(f"{place}: 'text' of a part must be a string, got {text!r:.80}")
    return Thoughts(text) if kind in _THOUGHT_KINDS else text


def _shown(number: int, part: Fields, raw: Mapping[str, Any], media: MediaResolver) -> Part | Bare:
    name = part["type"]
    kind = KINDS[name]
    settings = _settings(part, kind, f"turn {number}")
    own = f"{kind}_url" if name.startswith("input_") and name not in part else name
    key = part.first(own, kind, *_NAMED)
    value = None if key is None else part.get(key)
    if not is_set(value):
        if name not in ("image", "video", "audio"):
            raise DataError(f"turn {number}: a part of type {name} must hold {name!r}, got {raw!r:.80}")
        return Bare(kind, settings)
    if name == "input_audio":
        value = _spoken(number, value)
    elif key == "base64" and isinstance(value, str) and not value.startswith("data:"):
        value = f"data:{kind};base64,{value}"
    elif isinstance(value, Mapping):
        value = _address(value, kind)
    return show(kind, value, media, settings, _rate(part, f"turn {number}") if isinstance(value, list) else None)


def _address(value: Mapping[str, Any], kind: str) -> Any:
    """The address in OpenAI's {url} or Anthropic's {type, media_type, data}; another mapping as it is."""
    if isinstance(value.get("data"), str):
        return f"data:{value.get('media_type') or kind};base64,{value['data']}"
    return value["url"] if "url" in value else value


def _spoken(number: int, value: Any) -> str:
    """The address of {data, format} in an input_audio part."""
    if not isinstance(value, Mapping) or not isinstance(value.get("data"), str):
        raise DataError(f"turn {number}: 'input_audio' must hold 'data' in base64 and 'format', got {value!r:.80}")
    return f"data:audio/{value.get('format')};base64,{value['data']}"


def _rate(part: Fields, place: str) -> float | None:
    key = next((key for key in ("sample_fps", "raw_fps", "fps") if part.has(key)), None)
    return None if key is None else _number(part.get(key), key, place)


def _settings(part: Fields, kind: str, place: str) -> Settings:
    """A part's settings of its picture or video. Raises DataError for anything but a number in its range."""
    if kind == "audio":
        return PLAIN
    keys = _NUMBERS if kind == "video" else ("min_pixels", "max_pixels")
    found = {key: _number(part.get(key), key, place) for key in keys if part.has(key)}
    whole: dict[str, Any] = {key: value if key in _FRACTIONS else int(value) for key, value in found.items()}
    settings = Settings(**{_NUMBERS[key]: value for key, value in whole.items()})
    if settings.end is not None and settings.end <= settings.start:
        raise DataError(f"{place}: 'video_end' {settings.end:g} is not after 'video_start' {settings.start:g}")
    if settings.frames is not None and (settings.fps, settings.max_frames) != (None, None):
        raise DataError(f"{place}: 'nframes' beside 'fps' or 'max_frames'; leave it or them out")
    return settings


def _number(value: Any, key: str, place: str) -> float:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and value < 1e9
    lowest = 0.0 if key == "video_start" else 1e-3 if key in _FRACTIONS else 1
    if not fits or value < lowest:
        raise DataError(f"{place}: {key!r} must be a number of at least {lowest:g}, got {value!r:.40}")
    return value


# Names of the sides, whatever their case, in every format.
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant",
}  # fmt: skip
_CALL_ROLES = (
    "tool",
    "tool_call",
    "tool_calls",
    "tool_response",
    "function",
    "function_call",
    "observation",
    "ipython",
)
_MASKS = ("loss", "weight", "loss_weight", "loss_scale", "train")
_THOUGHT_KEYS = ("reasoning_content", "thinking")


@dataclass(frozen=True)
class Said:
    """One turn before files are inserted. parts: texts, files, and places of files that are named outside the turns.
    tagged: it was written as one text, in which tags may stand. learned, thoughts: see `dhp.data.read.records.Turn`."""

    role: str
    parts: tuple[Part | Bare, ...]
    tagged: bool = True
    learned: bool = True
    thoughts: str = ""

    @property
    def text(self) -> str:
        """Its texts, one behind the other."""
        return "".join(part for part in self.parts if isinstance(part, str))


def entries_of(raw: Fields, key: str) -> list[Any]:
    """The list of turns under `key`. Raises DataError when it is missing, of another type or empty."""
    if key not in raw:
        raise DataError(f"key {key!r} is missing; the sample has {sorted(map(str, raw))}")
    entries = _turned(raw[key])
    if not isinstance(entries, list):
        raise DataError(f"{key!r} must be a list of turns, got {type(entries).__name__}")
    if not entries:
        raise DataError(f"{key!r} is empty")
    return entries


def _turned(entries: Any) -> Any:
    """A list of turns from a turn of lists, as `datasets` has a Sequence of them; all else as it is."""
    if not isinstance(entries, Mapping) or not all(isinstance(column, list) for column in entries.values()):
        return entries
    if len({len(column) for column in entries.values()}) > 1:
        sizes = ", ".join(f"{key}: {len(column)}" for key, column in entries.items())
        raise DataError(f"columns of turns have different lengths ({sizes}). Write one entry a turn into each")
    return [dict(zip(entries, values, strict=True)) for values in zip(*entries.values(), strict=True)]


def statements(raw: Fields, key: str, names: tuple[str, str], media: MediaResolver) -> list[Said]:
    """The turns under `key`, in any of the ways to write one. names: of role and text, that errors tell of."""
    found: list[Said] = []
    for entry in entries_of(raw, key):
        found += _turns(len(found) + 1, entry, raw, names, media)
    return found


def _turns(number: int, entry: Any, raw: Fields, names: tuple[str, str], media: MediaResolver) -> list[Said]:
    """A turn, or the two of an exchange {user or human, assistant}."""
    place = f"turn {number}"
    turn = raw.within(entry, TURN, place, f"{names[0]!r} and {names[1]!r}")
    asker = turn.first("user", "human")
    if asker is not None and turn.first("role", "from", "content", "value") is None:
        question, answer = (turn.get(key) for key in (asker, "assistant"))
        if not isinstance(question, str) or not isinstance(answer, str):
            raise DataError(f"{place}: {asker!r} and 'assistant' must be strings, got {dict(entry)!r:.80}")
        return [Said("user", (question,)), Said(ANSWERS, (answer,), learned=_is_learned(turn, ANSWERS))]
    return [_statement(number, turn, names, media)]


def _statement(number: int, turn: Fields, names: tuple[str, str], media: MediaResolver) -> Said:
    role_key, text_key = turn.first("role", "from") or names[0], turn.first("content", "value") or names[1]
    named = turn.get(role_key)
    if not isinstance(named, str):
        raise DataError(
            f"{turn.place}: {role_key!r} must be a string, got {named!r:.80}; the turn has {sorted(map(str, turn))}. "
            f"If only names differ, set the dataset's columns, as columns={{{role_key}: speaker}}"
        )
    role = known_role(number, named)
    for key in ("tool_calls", "function_call"):
        if turn.has(key):
            raise DataError(f"{turn.place}: {key!r} is not read: {TOOLS}")
    content = turn.get(text_key)
    if not isinstance(content, str | list):
        got = f"{turn.place}: {text_key!r} must be a string or a list of parts, got {content!r:.80}"
        if isinstance(content, int | float):  # true and false are numbers here
            raise DataError(f'{got}. Write it as a string, "{json.dumps(content)}"')
        raise DataError(
            f"{got}; the turn has {sorted(map(str, turn))}. If only names differ, set the dataset's columns, as "
            f"columns={{{text_key}: text}}"
        )
    parts = [content] if isinstance(content, str) else read_parts(number, content, turn, media)
    thoughts = [part.text for part in parts if isinstance(part, Thoughts)]
    thoughts += [_text(turn, key) for key in _THOUGHT_KEYS if turn.has(key)]
    if len(thoughts) > 1 or (thoughts and role != ANSWERS):
        raise DataError(f"{turn.place}: thoughts stand once in an answer, as 'reasoning_content'; here {role} has them")
    kept = tuple(part for part in parts if not isinstance(part, Thoughts))
    return Said(role, kept, isinstance(content, str), _is_learned(turn, role), "".join(thoughts))


def _is_learned(turn: Fields, role: str) -> bool:
    """Whether a turn is learned, by the keys that other trainers use. Raises DataError for a weight that is neither 0
    nor 1."""
    masks = {key: turn.get(key) for key in _MASKS if turn.has(key)}
    for key, value in masks.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise DataError(
                f"{turn.place}: {key!r} {value!r:.20}: an answer is learned (1 or true) or not (0 or false), with no "
                "weight between. Round it, or repeat the dataset by data.data_registry.NAME.weight"
            )
        if role != ANSWERS and value:
            raise DataError(
                f"{turn.place}: {key!r} {value!r:.20}, but what the {role} says is never learned; set it to 0"
            )
    if len({bool(value) for value in masks.values()}) > 1:
        raise DataError(f"{turn.place}: {masks} contradict each other; leave one of them")
    return all(masks.values())


def known_role(number: int, role: str) -> str:
    """system, user or assistant. Raises DataError for a role that is none of them."""
    if role.lower() in _CALL_ROLES:
        raise DataError(f"turn {number}: role {role!r}: {TOOLS}. Leave such samples out")
    if role.lower() not in ROLES:
        raise DataError(f"turn {number}: unknown role {role!r}; known are {', '.join(ROLES)}")
    return ROLES[role.lower()]


def check_texts(said: Sequence[Said]) -> None:
    """Raises DataError for a question that shows and says nothing, an answer without text, and a conversation of which
    nothing is learned."""
    for number, one in enumerate(said, start=1):
        if one.text.strip():
            continue
        if one.role == ANSWERS:
            raise DataError(f"turn {number}: the answer is empty, so there is nothing to learn from it")
        if one.role == "user" and all(isinstance(part, str) for part in one.parts):
            raise DataError(
                f"turn {number}: the question is empty, so the answer would be learned without one. If it stands under "
                "another name, set the dataset's columns, as columns={query: ask}"
            )
    if not any(one.learned for one in said if one.role == ANSWERS):
        raise DataError(f"no answer is to be learned ({', '.join(_MASKS)} of every one is 0). Leave the sample out")


def check_order(roles: Sequence[str]) -> None:
    """Questions and answers alternate, after one optional system turn. Raises DataError."""
    spoken = roles[1:] if roles[0] == "system" else roles
    if "system" in spoken:
        raise DataError("a system turn can only be the first")
    if not spoken or spoken[0] != "user":
        raise DataError(
            "the conversation must begin with a human turn (after an optional system turn). Text alone without a "
            "question is pretraining, which is not read here"
        )
    for number, (role, following) in enumerate(zip(spoken, spoken[1:]), start=len(roles) - len(spoken) + 1):
        if role == following:
            raise DataError(f"turns {number} and {number + 1} are both from the {role}; roles must alternate")
    if spoken[-1] != ANSWERS:
        raise DataError(
            "the last turn must be from gpt: nothing is learned after it otherwise. Preferences, rewards and classes "
            "are not learned, answers are"
        )


def required_text(raw: Fields, key: str) -> str:
    """The text under `key`. Raises DataError where it is missing or of another type."""
    if raw.get(key) is None:
        raise DataError(f"key {key!r} is missing; the sample has {sorted(map(str, raw))}")
    return optional_text(raw, key)


def optional_text(raw: Fields, key: str) -> str:
    """The text under `key`; "" where there is none. Raises DataError for another type."""
    text = raw.get(key)
    if text is not None and not isinstance(text, str):
        raise DataError(f"{key!r} must be a string, got {text!r:.80}")
    return text or ""


def with_system(raw: Fields, said: Sequence[Said]) -> list[Said]:
    """The statements, after the text under `system` or `system_prompt` where there is one. A system turn without text
    goes, as an empty `system` does: the template's own takes its place."""
    said = [one for one in said if one.role != "system" or one.text.strip()]
    texts = list(dict.fromkeys(text for key in ("system", "system_prompt") if (text := optional_text(raw, key))))
    if len(texts) > 1:
        raise DataError("'system' and 'system_prompt' differ; leave one of them")
    return [*(Said("system", (text,)) for text in texts), *said]


def pairs_before(raw: Fields) -> list[Said]:
    """Earlier questions and answers under `history`, a list of pairs. Raises DataError."""
    history = raw.get("history")
    if history is not None and not isinstance(history, list):
        raise DataError(f"'history' must be a list of pairs of question and answer, got {history!r:.80}")
    said = []
    for number, pair in enumerate(history or [], start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(f"'history' {number} must be a pair of question and answer, got {pair!r:.80}")
        said += [Said("user", (pair[0],)), Said(ANSWERS, (pair[1],))]
    return said


def _text(turn: Mapping[str, Any], key: str) -> str:
    text = turn.get(key)
    if not isinstance(text, str):
        raise DataError(f"{key!r} must be a string, got {text!r:.80}")
    return text
