"""What Qwen's families share: patches by merged tokens, positions on three axes, a tower of fused blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dhp.base.geometry import Form, Grid
from dhp.models.patches import project_as_product
from dhp.models.processor import Processor
from dhp.models.tower import Tower

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class QwenProcessor(Processor):
    """Images and videos of any size. A grid is (steps in time, rows, columns) of patches."""

    def __init__(self, config: Any):
        super().__init__(config)
        vision = config.vision_config
        self.video_token_id, self.frames_per_patch = config.video_token_id, vision.temporal_patch_size
        self.patch_dim, self.merge_unit = patch_values(vision), vision.spatial_merge_size**2

    def load(self) -> None:
        """See `Processor`."""
        self.model()

    @abstractmethod
    def model(self) -> type[PreTrainedModel]:
        """Whose positions they are. Imported here: modeling code takes a second, and a driver runs no model."""

    def patches(self, output: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Grid]:
        t, h, w = (int(n) for n in output["image_grid_thw"][0])
        return np.ascontiguousarray(output["pixel_values"], dtype=np.float32), (t, h, w)

    def video_patches(self, output: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Grid]:
        frames, channels = self.frames_per_patch, self.config.vision_config.in_channels
        _, h, w = (int(n) for n in output["image_grid_thw"][0])
        # Each frame comes as a still image, repeated in time: of frame f, the copy at time f is taken.
        still = np.asarray(output["pixel_values"], dtype=np.float32).reshape(frames, h * w, channels, frames, -1)
        moving = np.stack([still[frame, :, :, frame] for frame in range(frames)], axis=2)
        return moving.reshape(h * w, self.patch_dim), (1, h, w)

    def position_ids(
        self,
        input_ids: Tensor,
        mm_token_type_ids: Tensor,
        grids: Tensor | None,
        lengths: Tensor,
        video_grids: Tensor | None = None,
        video_seconds: Tensor | None = None,
        forms: Sequence[Form] = (),
    ) -> Tensor:
        inside = torch.arange(input_ids.shape[1]) < lengths[:, None]  # [rows, tokens]
        kind, model = self.model(), SimpleNamespace(config=self.config)
        model.get_vision_position_ids = MethodType(kind.get_vision_position_ids, model)
        positions, _ = kind.get_rope_index(
            model,
            input_ids,
            mm_token_type_ids,
            image_grid_thw=grids,
            video_grid_thw=video_grids,
            second_per_grid_ts=video_seconds,
            attention_mask=inside.long(),
        )
        return positions


class QwenTower(Tower):
    """`model.visual`: blocks whose query, key and value are one matrix, and a merger of square groups of patches."""

    modules = ("model.visual",)
    projector: tuple[str, ...] = ("model.visual.merger",)
    fused = {"model.visual.blocks.*.attn.qkv": 3}

    def __init__(self, config: Any):
        super().__init__(config)
        vision = config.vision_config
        self.heads, self.patch_dim = vision.num_heads, patch_values(vision)
        self.merge_unit = self.dummy_patches = vision.spatial_merge_size**2

    def split_heads(self, model: PreTrainedModel, ranks: int) -> None:
        for block in model.model.visual.blocks:
            block.attn.num_heads = self.heads // ranks

    def use_attention(self, model: PreTrainedModel, name: str) -> None:
        # The attribute behind the property: its setter looks names with "flash" up on the hub, and without
        # "flash" in the name the tower would call us once per window instead of once per layer.
        model.model.visual.config._attn_implementation_internal = name
        project_as_product(model.model.visual.patch_embed.proj)


def patch_values(vision: Any) -> int:
    """Values in one patch."""
    return vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
