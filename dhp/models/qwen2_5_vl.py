"""Qwen2.5-VL: a native-resolution tower with window attention, and a decoder with three-axis rotary positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dhp.base.geometry import Form, Grid
from dhp.models.decoder import Decoder
from dhp.models.family import Family, ImageLayout, LayerParts
from dhp.models.flops import VisionWork
from dhp.models.qwen import QwenProcessor, QwenTower, patch_values
from dhp.models.tower import EMBEDDINGS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def qwen2_5_vl(config: Any) -> Family:
    """Qwen2.5-VL of that configuration."""
    return Family(config, Qwen25VlProcessor(config), Qwen25VlTower(config), Decoder(config))


class Qwen25VlProcessor(QwenProcessor):
    """A video is one run of placeholders; its positions in time go by seconds."""

    def model(self) -> type[PreTrainedModel]:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

        return Qwen2_5_VLModel


class Qwen25VlTower(QwenTower):
    """Most layers attend to windows, some to whole frames."""

    tensor_plan = {
        "model.visual.blocks.*.attn.proj": "rowwise",
        "model.visual.blocks.*.mlp.gate_proj": "colwise",
        "model.visual.blocks.*.mlp.up_proj": "colwise",
        "model.visual.blocks.*.mlp.down_proj": "rowwise",
        "model.visual.merger.mlp.0": "colwise",
        "model.visual.merger.mlp.2": "rowwise",
    }

    def __init__(self, config: Any):
        super().__init__(config)
        vision = config.vision_config
        work = self.work = _count_work(vision)
        self.attention_crossover_patches = work.token / work.segment_pair if work.segment_pair else float("inf")
        kinds = ("full" if layer in vision.fullatt_block_indexes else "window" for layer in range(vision.depth))
        self.layers = LayerParts(
            "model.visual.blocks", ("attn.qkv", "attn.proj"), ("mlp.gate_proj", "mlp.up_proj"), tuple(kinds)
        )

    def image_layout(self, grid: Grid | Form) -> ImageLayout:
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

    def encode(
        self,
        model: PreTrainedModel,
        pixels: Tensor,
        positions: Tensor,
        windows: Any,
        frames: Any,
        forms: Sequence[Form] = (),
    ) -> dict[str, Tensor]:
        tower = model.model.visual
        rows = len(pixels) // self.merge_unit
        # Everything the tower would derive from the grid is given, so that a shard, which has no grid, runs too.
        output = tower(
            pixels.to(tower.dtype),
            grid_thw=None,
            position_ids=positions,
            cu_seqlens=frames,
            max_seqlen=len(pixels),
            window_index=torch.arange(rows, device=pixels.device),
            cu_window_seqlens=windows,
            max_window_seqlen=len(pixels),
        )
        return {EMBEDDINGS: output.pooler_output}


def _count_work(vision: Any) -> VisionWork:
    width, full = vision.hidden_size, len(vision.fullatt_block_indexes)
    merged = width * vision.spatial_merge_size**2
    return VisionWork(
        patch=patch_values(vision) * width,
        token=vision.depth * width * (4 * width + 3 * vision.intermediate_size),
        window_pair=(vision.depth - full) * 2 * width,
        segment_pair=full * 2 * width,
        embedding=merged * (merged + vision.out_hidden_size),
    )
