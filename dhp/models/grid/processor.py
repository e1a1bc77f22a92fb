"""Pictures of any size as rows of patches, and the rotary positions that depend on their grids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dhp.base.geometry import Grid, ProcessorOutput
from dhp.models.generic.rows import positions
from dhp.models.processor import Processor


class GridProcessor(Processor):
    """Images and videos of any size. A grid is (steps in time, rows, columns) of patches; patches that are merged into
    one token are consecutive.

    paced: the model's positions of a video depend on the seconds between its steps.
    """

    paced = False

    def __init__(self, config: Any, base: type[nn.Module] | None = None):
        super().__init__(config)
        vision = config.vision_config
        self._base = base
        self.video_token_id, self.frames_per_patch = config.video_token_id, frames_per_patch(vision)
        self.patch_dim, self.merge_unit = patch_values(vision), merge_side(vision) ** 2

    def load(self) -> None:
        """See `Processor`."""
        self.model()

    def model(self) -> type[nn.Module]:
        """The model class that computes positions. Imported here where none was given: modeling code takes a second,
        and a driver runs no model."""
        if self._base is None:
            raise NotImplementedError(f"{type(self).__name__} must say whose positions its tokens have")
        return self._base

    def patches(self, output: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Grid]:
        t, h, w = (int(n) for n in output["image_grid_thw"][0])
        rows = np.asarray(output["pixel_values"], dtype=np.float32).reshape(t * h * w, self.patch_dim)
        return np.ascontiguousarray(rows), (t, h, w)

    def video_patches(self, output: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Grid]:
        frames, channels = self.frames_per_patch, channels_of(self.config.vision_config)
        _, h, w = (int(n) for n in output["image_grid_thw"][0])
        # Each frame comes as a still image, repeated in time: of frame f, the copy at time f is taken.
        still = np.asarray(output["pixel_values"], dtype=np.float32).reshape(frames, h * w, channels, frames, -1)
        moving = np.stack([still[frame, :, :, frame] for frame in range(frames)], axis=2)
        return moving.reshape(h * w, self.patch_dim), (1, h, w)

    def frames(self, pixels: np.ndarray, grid: Grid | ProcessorOutput, moving: bool = False) -> np.ndarray | None:
        """See `Processor`. An image is one frame, which its patches repeat in time."""
        if isinstance(grid, ProcessorOutput):
            return None
        vision = self.config.vision_config
        shape = (channels_of(vision), self.frames_per_patch, int(vision.patch_size))
        return put_together(pixels, grid, merge_side(vision), *shape)[:: 1 if moving else self.frames_per_patch]

    def plain_inputs(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in named.items() if self.paced or name != "second_per_grid_ts"}

    def position_ids(
        self,
        input_ids: Tensor,
        mm_token_type_ids: Tensor,
        grids: Tensor | None,
        lengths: Tensor,
        video_grids: Tensor | None = None,
        video_seconds: Tensor | None = None,
        forms: Sequence[ProcessorOutput] = (),
        **more: Tensor,
    ) -> Tensor:
        inside = torch.arange(input_ids.shape[1]) < lengths[:, None]  # [rows, tokens]
        given = {"image_grid_thw": grids, "video_grid_thw": video_grids, **more}
        given |= dict.fromkeys(("second_per_grid_ts", "second_per_grids"), video_seconds)  # names that models give it
        return positions(self.model(), self.config, input_ids, mm_token_type_ids, inside, given)


def put_together(pixels: np.ndarray, grid: Grid, merge: int, channels: int, frames: int, side: int) -> np.ndarray:
    """Pictures from patches in consecutive squares of merge × merge: float32 [t × frames, height, width, channels]."""
    t, h, w = grid
    rows = pixels.reshape(t, h // merge, w // merge, merge, merge, channels, frames, side, side)
    return rows.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(t * frames, h * side, w * side, channels)


def channels_of(vision: Any) -> int:
    """Channels of a picture, for a tower of that configuration."""
    return int(getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or 3)


def frames_per_patch(vision: Any) -> int:
    """Frames of a video that are one step in time."""
    return int(getattr(vision, "temporal_patch_size", 1))


def merge_side(vision: Any) -> int:
    """Patches along a side of the square that becomes one token."""
    side = getattr(vision, "spatial_merge_size", None) or vision.merge_kernel_size
    return int(side if isinstance(side, int) else side[0])


def patch_values(vision: Any) -> int:
    """Values in one patch."""
    return channels_of(vision) * frames_per_patch(vision) * int(vision.patch_size) ** 2
