"""Types of pictures and tokens that data, models and parallel share: a grid, a label, a range of tokens."""

from __future__ import annotations

from dataclasses import dataclass

Grid = tuple[int, int, int]  # (t, h, w) of an image or a video, in patches


@dataclass(frozen=True)
class ProcessorOutput:
    """A picture that is not a grid: what its image processor gave, without the numbers of the pixels.

    pixels: names and shapes of the arrays of pixels, which are sent as [rows, values], one after another. arrays: the
    other arguments of the encoder: name, dtype, shape and bytes of each. tokens: placeholders. written: what a prompt
    has in the picture's place.
    """

    pixels: tuple[tuple[str, tuple[int, ...]], ...]
    arrays: tuple[tuple[str, str, tuple[int, ...], bytes], ...]
    rows: int
    tokens: int
    written: str = ""


IGNORED = -100  # the label of a token that is not a target
SOUND = 3  # the kind of a token in whose place sound goes; those of pictures have 1 and 2, text has 0


@dataclass(frozen=True)
class TokenRange:
    """`count` consecutive tokens of a segment (an image, a frame, a document), from its `first`-th on."""

    segment: int
    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass(frozen=True)
class PositionRange:
    """How many positions a model knows. of_pictures: each token of a picture has one of its own, as text has; False:
    they share some (rotary positions by rows and columns)."""

    count: int
    of_pictures: bool
