"""A validated conversation: turns of text, images, videos and sounds, in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from dhp.core.errors import DataError
from dhp.data.media.sources import File, Picture, SizedImage, Sound, Video

Part = str | Picture | Sound
ANSWERS = "assistant"  # the role that answers
WRITES = "text"  # the role of plain text, which is its record's only turn


@dataclass(frozen=True)
class Turn:
    """One turn. role: system, user or assistant, or WRITES; parts: text (str), images (File, or SizedImage
    where the row has settings of it), videos (Video) and sounds (Sound).

    learned: of an answer, whether it is. thoughts: of an answer, what was reasoned before it; "": nothing.
    """

    role: str
    parts: tuple[Part, ...]
    learned: bool = True
    thoughts: str = ""


@dataclass(frozen=True)
class Record:
    """One conversation. position: its 1-based number among the samples of its dataset, in all files. where: its line,
    element or row and the file, in words, for errors. unread: keys that the raw sample has and its reader did not take.
    """

    dataset: str
    position: int
    where: str
    turns: tuple[Turn, ...]
    unread: tuple[str, ...] = ()

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
        return replace(self, turns=self.turns[:first]), said

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
