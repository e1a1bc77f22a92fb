"""Words that data, models and parallel share about pictures and tokens: a grid, a label, a range of tokens."""

from __future__ import annotations

from dataclasses import dataclass

Grid = tuple[int, int, int]  # (t, h, w) of an image or a video, in patches

IGNORED = -100  # the label of a token that is not a target


@dataclass(frozen=True)
class TokenRange:
    """`count` consecutive tokens of a segment (an image, a frame, a document), from its `first`-th on."""

    segment: int
    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count
