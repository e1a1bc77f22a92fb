"""Validates conversations as records; tracks which fields were read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from dhp.core.errors import DataError
from dhp.core.preferences import CHOSEN, OTHER, REJECTED
from dhp.data.media.sources import File, Picture, SizedImage, Sound, Video

Part = str | Picture | Sound
ANSWERS = "assistant"  # the role that answers
WRITES = "text"  # the role of plain text, which is its record's only turn


@dataclass(frozen=True)
class Turn:
    """One turn. role: system, user or assistant, or WRITES; parts: text (str), images (File, or SizedImage
    where the row has settings of it), videos (Video) and sounds (Sound).

    learned: of an answer, whether it is. thoughts: of an answer, what was reasoned before it; "": nothing."""

    role: str
    parts: tuple[Part, ...]
    learned: bool = True
    thoughts: str = ""


@dataclass(frozen=True)
class Record:
    """One conversation. position: its 1-based number among the samples of its dataset, in all files. where: its line,
    element or row and the file, in words, for errors. unread: keys that the raw sample has and its reader did not take.

    other: of a preference, its second side. liked: of a single answer, whether it is; None: the first side is better.
    """

    dataset: str
    position: int
    where: str
    turns: tuple[Turn, ...]
    unread: tuple[str, ...] = ()
    other: Record | None = None
    liked: bool | None = None

    @property
    def sides(self) -> tuple[int, int]:
        """Of a preference, what its two sides are (`dhp.core.preferences.Mark`)."""
        return (CHOSEN, REJECTED) if self.liked is None else (CHOSEN if self.liked else REJECTED, OTHER)

    @property
    def asks(self) -> bool:
        """Whether it ends before an answer: a prompt. Annotations never do."""
        return self.turns[-1].role not in (ANSWERS, WRITES)

    @property
    def written(self) -> str | None:
        """The plain text that it is; None for a conversation."""
        return str(self.turns[0].parts[0]) if self.turns[0].role == WRITES else None

    def up_to_answer(self) -> tuple[Record, str]:
        """The prompt of the first answer that is learned, and the text of that answer. Raises DataError where there is
        none."""
        answers = (number for number, turn in enumerate(self.turns) if turn.role == ANSWERS and turn.learned)
        first = next(answers, 0)
        if not first:  # an answer stands behind a question
            raise DataError(f"{self.where}: no answer of it is learned, so it asks for none")
        said = "".join(part for part in self.turns[first].parts if isinstance(part, str))
        return replace(self, turns=self.turns[:first], other=None), said

    @property
    def learned(self) -> tuple[bool, ...]:
        """Of each answer, whether it is learned."""
        return tuple(turn.learned for turn in self.turns if turn.role == ANSWERS)

    @property
    def media(self) -> tuple[Picture, ...]:
        """All images and videos, in the order in which the conversation shows them."""
        return tuple(part for turn in self.turns for part in turn.parts if not isinstance(part, str | Sound))

    @property
    def images(self) -> tuple[File | SizedImage, ...]:
        """All images, in the order in which the conversation shows them."""
        return tuple(part for part in self.media if not isinstance(part, Video))

    @property
    def sounds(self) -> tuple[File, ...]:
        """All clips of sound, in the order in which the conversation has them."""
        return tuple(part.file for turn in self.turns for part in turn.parts if isinstance(part, Sound))


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put the place `where` in front of a DataError raised inside."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


_NOTHING = ("", b"", "[]", "{}")
ROW, TURN, PART = "", "turn", "part"


class Fields(Mapping[str, Any]):
    """One raw object: a row, a turn of it or a part of a turn. Looking a key up takes it; `in` and iteration take
    nothing."""

    def __init__(self, raw: Mapping[str, Any], level: str = ROW, place: str = "", row: Fields | None = None) -> None:
        """level: ROW, TURN or PART. place: of a turn or part in words, for errors. row: that it is in."""
        self.level, self.place = level, place
        self._raw, self._taken = raw, set[str]()
        self._all: list[Fields] = [] if row is None else row._all
        self._all.append(self)

    def __getitem__(self, key: str) -> Any:
        self._taken.add(key)
        return self._raw[key]

    def __contains__(self, key: object) -> bool:
        return key in self._raw

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def peek(self, key: str) -> Any:
        """The value of a key, which is not taken by that; None where there is none."""
        return self._raw.get(key)

    def has(self, *keys: str) -> bool:
        """Whether one of these keys is set. Takes none."""
        return any(key in self._raw and is_set(self._raw[key]) for key in keys)

    def first(self, *keys: str) -> str | None:
        """The first of these keys that is there, set ones before others; None where none is. Takes none."""
        there = [key for key in keys if key in self._raw]
        return next((key for key in there if is_set(self._raw[key])), there[0] if there else None)

    def within(self, raw: Any, level: str, place: str, wanted: str) -> Fields:
        """An object inside. wanted: what it should be. Raises DataError where it is no object."""
        if not isinstance(raw, Mapping):
            raise DataError(f"{place} must be an object with {wanted}, got {type(raw).__name__}")
        return Fields(raw, level, place, self)

    def left(self) -> Iterator[tuple[Fields, str, Any]]:
        """Keys that are set and were not taken, of this object and of those inside: where, key, value."""
        for fields in self._all:
            for key, value in fields._raw.items():
                if key not in fields._taken and is_set(value):
                    yield fields, str(key), value


def is_set(value: Any) -> bool:
    """Whether a value says anything: tables fill the keys that a row does not have with null, also inside."""
    if isinstance(value, str):
        return value not in _NOTHING
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Mapping | list | tuple):
            left += one.values() if isinstance(one, Mapping) else one
        elif one is not None and one not in _NOTHING:
            return True
    return False


TOOLS = "tool calls are not read; only text, images, videos and sound are"
_PREFERENCES = (
    "preferences are trained with training.objective=dpo, orpo or kto, and this run is supervised, on answers alone. "
    "Leave the key out where the other answer of the row is to be learned as it is"
)
_PAIRED = (
    "rows with 'chosen' and 'rejected' are preferences: set training.objective=dpo or orpo. This run is supervised, on "
    "answers alone; write the chosen answer as the last turn and leave both keys out where it is to be learned"
)
_TWICE = "the sample has its conversation or its files under other keys, which were read. Leave one of them out"
_SIZES = "give 'min_pixels' and 'max_pixels' (areas) of the picture, or data.max_pixels for all"


@dataclass(frozen=True)
class Refusal:
    """keys: a pattern over whole names. levels: where they stand. say: why not, and what to do. values: those that are
    refused; None: all that are set. unless: those that are not."""

    keys: str
    levels: tuple[str, ...]
    say: str
    values: tuple[Any, ...] | None = None
    unless: tuple[Any, ...] = ()

    def holds(self, level: str, key: str, value: Any) -> bool:
        """Whether a key that no reader took is refused."""
        if level not in self.levels or not re.fullmatch(self.keys, key):
            return False
        plain = value if isinstance(value, str | bool | int | float) else repr(value)
        return plain not in self.unless if self.values is None else plain in self.values


# `label: 1` and `weight: 1` are what is done anyway; True == 1 and False == 0 in Python.
REFUSED = (
    Refusal("tools|functions|tool_calls?|function_calls?|tool_choice", (ROW, TURN), TOOLS, unless=(False,)),
    Refusal("tool_responses?|tool_results?|tool_use", (ROW, TURN), TOOLS),
    Refusal(
        "objects", (ROW, TURN),
        "write boxes into the text, in the words that the model uses for them",
    ),
    Refusal(
        "label|kto_tag|kto_label", (ROW,),
        "an answer that is marked as a bad one would be learned. Leave such rows out, or set training.objective=kto",
        values=(0, "false", "False"),
    ),
    Refusal("(rejected|chosen)(_.*)?", (ROW, TURN), _PREFERENCES),
    Refusal(
        "clip", (ROW,),
        "a row with one video takes it as [start, end] in seconds; elsewhere give 'video_start' and 'video_end' of "
        "its part",
    ),
    Refusal(
        "chat_template_kwargs|mm_processor_kwargs|processor_kwargs", (ROW,),
        "arguments of a template or processor are the configuration's (data.max_pixels, data.chat_template)",
    ),
    Refusal(
        "loss|weight|loss_weight|loss_scale|train", (ROW, PART),
        "weights of answers stand in their turns (0 or 1); data.data_registry.NAME.weight repeats a dataset",
        unless=(1, "train"),
    ),
    Refusal("train_detail|spans", (TURN,), "an answer is learned whole or, by 'train' or 'weight' 0, not at all"),
    Refusal("loss_mask|(prompt|completion|assistant)_masks?|token_weights", (ROW,), "the chat template says "
            "where answers are; 'loss' or 'weight' of a turn says whether one is learned"),
    Refusal("messages|conversations?|texts|history|system|system_prompt", (ROW,), _TWICE),
    Refusal("(image|video|audio)s?", (ROW, TURN), "files stand beside the turns or as parts of one, under one key "
            "a kind. Bring them there, or leave them out"),
    Refusal("images|videos|audios|path|url|base64|value|source|image|video|audio|file", (PART,),
            "the part names its file under another key, which was read. Leave one of them out"),
    Refusal("reasoning_content|reasoning|thinking|thoughts", (ROW, TURN, PART),
            "thoughts are read of an answer's turn, as 'reasoning_content'"),
    Refusal("context", (ROW,), "text beside a question is read under 'input': set columns={input: context}"),
    Refusal("resized_(height|width)", (ROW, PART), _SIZES),
    Refusal("(min|max|total)_pixels|(video|image)_(min|max)_pixels", (ROW, PART), _SIZES),
    Refusal("(min|max)_frames|nframes|num_frames|fps|video_(start|end)|start_time|end_time", (PART,),
            "of a video's part, 'fps', 'nframes', 'max_frames', 'video_start' and 'video_end' are read"),
)  # fmt: skip

_NAMES = ("id",)  # name a sample and say nothing of it
# Where a row shows nothing, these are files under a name that no format has.
_FILES = re.compile(
    r"(image|img|picture|photo|pic|video|audio|sound)s?(_?(path|file|name|url|filename|bytes))?s?|file_names?|frames"
)


def check_paired(raw: Mapping[Any, Any]) -> None:
    """Raises DataError, with the reason alone, for a row with a better and a worse answer, before its turns are read:
    what else is wrong with these follows from it."""
    names = [str(key) for key, value in raw.items() if is_set(value)]
    if all(any(re.fullmatch(f"{kind}(_.*)?", name) for name in names) for kind in ("chosen", "rejected")):
        raise DataError(_PAIRED)


def check_left(row: Fields, shows: bool) -> tuple[str, ...]:
    """The keys that were not taken, as lists of them name them. shows: whether the sample has any picture or sound.

    Raises DataError, with the reason alone, for one that changes what is learned."""
    unread = []
    for fields, key, value in row.left():
        where = f"{fields.place}: " if fields.place else ""
        for refusal in REFUSED:
            if refusal.holds(fields.level, key, value):
                raise DataError(f"{where}{key!r} ({value!r:.40}) is not read: {refusal.say}")
        if fields.level == ROW and not shows and _FILES.fullmatch(key) and not isinstance(value, bool | int | float):
            kind = next((kind for kind in ("video", "audio") if kind in key), "image")
            raise DataError(
                f"{key!r} ({value!r:.40}) is not read, so text alone would be learned. Set columns={{{kind}s: {key}}} "
                "for this dataset, or leave the key out"
            )
        if key not in _NAMES:
            unread.append(f"{fields.level}.{key}" if fields.level else key)
    return tuple(dict.fromkeys(unread))
