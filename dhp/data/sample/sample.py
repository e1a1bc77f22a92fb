"""One preprocessed conversation: the model's inputs, as numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from dhp.core.batch import IGNORED, Features, Grid, ProcessorOutput
from dhp.data.media.frames import LongVideo


@dataclass(frozen=True, eq=False)
class Sample:
    """The model's inputs of one conversation. L: its tokens, each placeholder repeated to the length of its picture.

    position: 1-based number among the samples of `dataset`, in all its files. "Picture": an image or a video.
    """

    dataset: str
    position: int
    input_ids: np.ndarray  # int64 [L]
    labels: np.ndarray  # int64 [L], IGNORED outside answers; not shifted: labels[i] is input_ids[i]
    mm_token_type_ids: np.ndarray  # int64 [L], 0 at text, 1 at tokens of images, 2 of videos, 3 of sound
    # One float32 [patches, channels × frames × patch × patch] a picture; a long video's are still in its file.
    pixels: tuple[np.ndarray | LongVideo, ...]
    grids: tuple[Grid | ProcessorOutput, ...]  # one a picture: t × h × w = patches, or the form of one that is no grid
    seconds: tuple[float | None, ...] = ()  # one a picture: of one step in t of a video, None: an image; (): all images
    clips: tuple[np.ndarray, ...] = ()  # one float32 [frames, bins] a clip of sound
    clip_forms: tuple[ProcessorOutput, ...] = ()  # one a clip
    features: tuple[Features, ...] = ()  # one a picture, where they are cached, without rows of pixels

    @property
    def video_seconds(self) -> tuple[float | None, ...]:
        """`seconds`, one a picture."""
        return self.seconds or (None,) * len(self.grids)

    @property
    def patches(self) -> int:
        """Of all pictures, those that are not here included."""
        return sum(grid.rows if isinstance(grid, ProcessorOutput) else prod(grid) for grid in self.grids)

    @property
    def target_tokens(self) -> int:
        """Tokens that the loss counts. The first token of a row is predicted by nothing."""
        return int((self.labels[1:] != IGNORED).sum())
