"""One preprocessed conversation as numpy arrays; sizes of its pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dhp.core.batch import IGNORED, Features, Grid, ProcessorOutput
from dhp.core.errors import ConfigError
from dhp.data.media.frames import FrameSampling, LongVideo
from dhp.data.sample.lengths import Size

if TYPE_CHECKING:
    from transformers.image_processing_utils import BaseImageProcessor


@dataclass(frozen=True, eq=False)
class Sample:
    """The model's inputs of one conversation. L: its tokens, each placeholder repeated to the length of its picture.

    position: 1-based number among the samples of `dataset`, in all its files. "Picture": an image or a video."""

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


Output = Mapping[str, np.ndarray]  # of the image processor


@dataclass(frozen=True)
class Videos:
    """Video preprocessing of one model.

    patches: the image processor's output for one group of frames → (rows float32 [patches, dim], grid).

    max_pixels: width × height of a frame; None: as an image's. size: of each scaled frame of a video, by how many are
    taken and their size; None: as an image's. It holds where no bounds are set.

    step_tokens: None where a video is one run of placeholders in the prompt. Otherwise each step in time is a run of
    its own, which stands between these two tokens, and these between the texts that `step_text` makes of its seconds.
    """

    token_id: int
    taking: FrameSampling
    patches: Callable[[Output], tuple[np.ndarray, Grid]]
    max_pixels: int | None = None
    step_tokens: tuple[int, int] | None = None
    step_text: Callable[[float, float], tuple[str, str]] = lambda middle, first: ("", "")
    size: Callable[[int, Size], Size] | None = None


def area_bounds(
    processor: BaseImageProcessor, min_pixels: int | None, max_pixels: int | None, upper: str = "data.max_pixels"
) -> dict[str, Any]:
    """Arguments of the image processor that bound a scaled image's area; none leaves it its own bounds."""
    if min_pixels is None and max_pixels is None:
        return {}
    if "min_pixels" not in processor.valid_kwargs.__annotations__:
        raise ConfigError(
            f"data.min_pixels = {min_pixels}, {upper} = {max_pixels}, but {type(processor).__name__} does "
            "not scale images by area. Leave both unset (null)"
        )
    # Processors that scale by area nevertheless call the two bounds "edges".
    shortest = processor.size["shortest_edge"] if min_pixels is None else min_pixels
    longest = processor.size["longest_edge"] if max_pixels is None else max_pixels
    if not 0 < shortest <= longest:
        raise ConfigError(
            f"images need 0 < data.min_pixels <= {upper}, got {shortest} and {longest} "
            "(the image processor's own value where unset)"
        )
    return {"size": {"shortest_edge": shortest, "longest_edge": longest}}
