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

from dhp.models.decoder import last_hidden_states
from dhp.models.family import DecoderInputs, Grid, ImageLayout, LayerParts, text_work
from dhp.models.flops import VisionWork
from dhp.models.patches import project_as_product


class Qwen25Vl:
    """See `dhp.models.family.Family`."""

    vision_modules = ("model.visual",)
    text_modules = ("model.language_model", "lm_head")
    vision_tensor_plan = {
        "model.visual.blocks.*.attn.proj": "rowwise",
        "model.visual.blocks.*.mlp.gate_proj": "colwise",
        "model.visual.blocks.*.mlp.up_proj": "colwise",
        "model.visual.blocks.*.mlp.down_proj": "rowwise",
        "model.visual.merger.mlp.0": "colwise",
        "model.visual.merger.mlp.2": "rowwise",
    }
    vision_fused = {"model.visual.blocks.*.attn.qkv": 3}
    text_kv_projections = tuple(f"model.language_model.layers.*.self_attn.{p}_proj" for p in "kv")

    def __init__(self, config: Any):
        self.config = config
        vision, text = config.vision_config, config.get_text_config()
        self.vision_heads = vision.num_heads
        self.text_heads = text.num_attention_heads
        self.text_kv_heads = text.num_key_value_heads
        self.patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        self.image_token_id = config.image_token_id
        self.video_token_id, self.frames_per_patch = config.video_token_id, vision.temporal_patch_size
        work = self.vision_work = _vision_work(vision)
        self.text_work = text_work(text)
        self.vision_knee = work.token / work.segment_pair if work.segment_pair else float("inf")
        mlp = ("mlp.gate_proj", "mlp.up_proj")
        kinds = ("full" if layer in vision.fullatt_block_indexes else "window" for layer in range(vision.depth))
        self.vision_layers = LayerParts("model.visual.blocks", ("attn.qkv", "attn.proj"), mlp, tuple(kinds))
        self.text_layers = LayerParts(
            "model.language_model.layers",
            tuple(f"self_attn.{p}_proj" for p in "qkvo"),
            mlp,
            ("causal",) * text.num_hidden_layers,
        )
        self._merge = vision.spatial_merge_size
        self.merge_unit = self.dummy_patches = self._merge**2

    def split_vision_heads(self, model: PreTrainedModel, ranks: int) -> None:
        for block in model.model.visual.blocks:
            block.attn.num_heads = self.vision_heads // ranks

    def share_kv_heads(self, model: PreTrainedModel, ranks: int) -> None:
        for layer in model.model.language_model.layers:
            layer.self_attn.num_key_value_groups = self.text_heads // ranks

    def freeze_unused(self, model: PreTrainedModel) -> None:
        """Nothing: every parameter of the tower is used."""

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

    def plain_inputs(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(named)

    def image_tokens(self, grid: Grid) -> int:
        t, h, w = grid
        return t * h * w // self.merge_unit

    def image_layout(self, grid: Grid) -> ImageLayout:
        vision, thw = self.config.vision_config, torch.tensor([grid])
        order, window_bounds = get_vision_window_index(thw, self._merge, vision.window_size, vision.patch_size)
        unit = self.merge_unit
        positions = get_vision_position_ids(thw, self._merge)  # [patches, 2]
        positions = positions.view(-1, unit, 2)[order].view(-1, 2)
        t, h, w = grid
        return ImageLayout(
            order=order,
            unit=unit,
            window_lengths=tuple(window_bounds.diff().tolist()),
            frame_lengths=(h * w,) * t,
            positions=positions,
        )

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

    def use_attention(self, model: PreTrainedModel, name: str) -> None:
        # The attribute behind the property: its setter looks names with "flash" up on the hub, and without
        # "flash" in the name the tower would call us once per window instead of once per layer.
        model.model.visual.config._attn_implementation_internal = name
        project_as_product(model.model.visual.patch_embed.proj)

    def encode(self, model: PreTrainedModel, pixels: Tensor, positions: Tensor, windows: Any, frames: Any) -> Tensor:
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
        return output.pooler_output

    def use_text_attention(self, model: PreTrainedModel, name: str) -> None:
        model.model.language_model.config._attn_implementation_internal = name

    def hidden_states(self, model: PreTrainedModel, inputs: DecoderInputs, **extra: Any) -> Tensor:
        return last_hidden_states(model, inputs, **extra)


def _vision_work(vision: Any) -> VisionWork:
    width, full = vision.hidden_size, len(vision.fullatt_block_indexes)
    merged = width * vision.spatial_merge_size**2
    return VisionWork(
        patch=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * width,
        token=vision.depth * width * (4 * width + 3 * vision.intermediate_size),
        window_pair=(vision.depth - full) * 2 * width,
        segment_pair=full * 2 * width,
        embedding=merged * (merged + vision.out_hidden_size),
    )
