"""Qwen2.5-VL: a native-resolution tower with window attention, and a decoder with three-axis rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from dhp.models.decoder import Decoder
from dhp.models.family import Family, Grid, ImageLayout, LayerParts
from dhp.models.flops import VisionWork
from dhp.models.patches import project_as_product
from dhp.models.processor import Processor
from dhp.models.tower import EMBEDDINGS, Tower


def qwen2_5_vl(config: Any) -> Family:
    """Qwen2.5-VL of that configuration."""
    return Family(config, Qwen25VlProcessor(config), Qwen25VlTower(config), Decoder(config))


class Qwen25VlProcessor(Processor):
    """Patches in the order of merged tokens; positions on three axes."""

    def __init__(self, config: Any):
        super().__init__(config)
        vision = config.vision_config
        self.video_token_id, self.frames_per_patch = config.video_token_id, vision.temporal_patch_size
        self.patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        self.merge_unit = vision.spatial_merge_size**2

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
    ) -> Tensor:
        inside = torch.arange(input_ids.shape[1]) < lengths[:, None]  # [rows, tokens]
        model = SimpleNamespace(config=self.config)
        model.get_vision_position_ids = MethodType(Qwen2_5_VLModel.get_vision_position_ids, model)
        positions, _ = Qwen2_5_VLModel.get_rope_index(
            model,
            input_ids,
            mm_token_type_ids,
            image_grid_thw=grids,
            video_grid_thw=video_grids,
            second_per_grid_ts=video_seconds,
            attention_mask=inside.long(),
        )
        return positions


class Qwen25VlTower(Tower):
    """Most layers attend to windows, some to whole frames."""

    modules = ("model.visual",)
    projector = ("model.visual.merger",)
    tensor_plan = {
        "model.visual.blocks.*.attn.proj": "rowwise",
        "model.visual.blocks.*.mlp.gate_proj": "colwise",
        "model.visual.blocks.*.mlp.up_proj": "colwise",
        "model.visual.blocks.*.mlp.down_proj": "rowwise",
        "model.visual.merger.mlp.0": "colwise",
        "model.visual.merger.mlp.2": "rowwise",
    }
    fused = {"model.visual.blocks.*.attn.qkv": 3}

    def __init__(self, config: Any):
        super().__init__(config)
        vision = config.vision_config
        self.heads = vision.num_heads
        self.patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        self.merge_unit = self.dummy_patches = vision.spatial_merge_size**2
        work = self.work = _count_work(vision)
        self.attention_crossover_patches = work.token / work.segment_pair if work.segment_pair else float("inf")
        kinds = ("full" if layer in vision.fullatt_block_indexes else "window" for layer in range(vision.depth))
        self.layers = LayerParts(
            "model.visual.blocks", ("attn.qkv", "attn.proj"), ("mlp.gate_proj", "mlp.up_proj"), tuple(kinds)
        )

    def split_heads(self, model: PreTrainedModel, ranks: int) -> None:
        for block in model.model.visual.blocks:
            block.attn.num_heads = self.heads // ranks

    def image_layout(self, grid: Grid) -> ImageLayout:
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

    def use_attention(self, model: PreTrainedModel, name: str) -> None:
        # The attribute behind the property: its setter looks names with "flash" up on the hub, and without
        # "flash" in the name the tower would call us once per window instead of once per layer.
        model.model.visual.config._attn_implementation_internal = name
        project_as_product(model.model.visual.patch_embed.proj)

    def encode(
        self, model: PreTrainedModel, pixels: Tensor, positions: Tensor, windows: Any, frames: Any
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
        patch=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * width,
        token=vision.depth * width * (4 * width + 3 * vision.intermediate_size),
        window_pair=(vision.depth - full) * 2 * width,
        segment_pair=full * 2 * width,
        embedding=merged * (merged + vision.out_hidden_size),
    )
