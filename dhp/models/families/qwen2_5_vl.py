"""Qwen2.5-VL: a tower with window attention; three-axis positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dhp.core.batch import Grid, ProcessorOutput
from dhp.models.decoder import Decoder
from dhp.models.families.grid import GridProcessor, GridTower, grid_work
from dhp.models.family import Family
from dhp.models.types import ImageLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def qwen2_5_vl(config: Any) -> Family:
    """Qwen2.5-VL of that configuration."""
    return Family(config, Qwen25VlProcessor(config), Qwen25VlTower(config), Decoder(config))


class Qwen25VlProcessor(GridProcessor):
    """A video is one run of placeholders; its temporal positions depend on seconds."""

    paced = True

    def model(self) -> type[PreTrainedModel]:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

        return Qwen2_5_VLModel


class Qwen25VlTower(GridTower):
    """Most layers attend to windows, some to whole frames."""

    tensor_plan = {
        "model.visual.blocks.*.attn.proj": "rowwise",
        "model.visual.blocks.*.mlp.gate_proj": "colwise",
        "model.visual.blocks.*.mlp.up_proj": "colwise",
        "model.visual.blocks.*.mlp.down_proj": "rowwise",
        "model.visual.merger.mlp.0": "colwise",
        "model.visual.merger.mlp.2": "rowwise",
    }

    gates = ("mlp.gate_proj", "mlp.up_proj")
    position_columns = 2  # row, column

    def __init__(self, config: Any):
        vision = config.vision_config
        super().__init__(config, grid_work(vision, gated=True, full=len(vision.fullatt_block_indexes)))

    def kinds(self, vision: Any) -> tuple[str, ...]:
        return tuple("full" if layer in vision.fullatt_block_indexes else "window" for layer in range(vision.depth))

    def image_layout(self, grid: Grid | ProcessorOutput) -> ImageLayout:
        from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

        vision, thw = self.config.vision_config, torch.tensor([grid])
        unit, merge = self.merge_unit, vision.spatial_merge_size
        order, window_bounds = get_vision_window_index(thw, merge, vision.window_size, vision.patch_size)
        positions = get_vision_position_ids(thw, merge)  # [patches, 2]
        positions = positions.view(-1, unit, 2)[order].view(-1, 2)
        t, h, w = grid
        return ImageLayout(
            order=order,
            unit=unit,
            window_lengths=tuple(window_bounds.diff().tolist()),
            frame_lengths=(h * w,) * t,
            positions=positions,
        )

    def derive(self, tower: Any, positions: Tensor, windows: Any, frames: Any) -> dict[str, Any]:
        rows = len(positions) // self.merge_unit
        return {
            "window_index": torch.arange(rows, device=positions.device),
            "cu_window_seqlens": windows,
            "max_window_seqlen": len(positions),
        }
