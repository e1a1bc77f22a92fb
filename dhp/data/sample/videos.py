"""What a model takes of a video: which frames, of which size, and how its steps in time stand in the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from dhp.core.batch import Grid
from dhp.data.media.frames import FrameSampling
from dhp.data.sample.lengths import Size

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
