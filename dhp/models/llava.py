"""LLaVA: a CLIP or SigLIP tower that sees each image by itself at one size, and an ordinary decoder.

Images are independent, so the ranks that share a "sequence" here share the images of a micro-batch: stage one of
two-stage sharding (LongVILA, Chen et al. 2024, section 3.2), without any communication in the tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dhp.base.errors import ModelError
from dhp.models.decoder import last_hidden_states
from dhp.models.family import DecoderInputs, Grid, ImageLayout, LayerParts, text_work
from dhp.models.flops import VisionWork
from dhp.models.patches import project_as_product

_TOWER = "model.vision_tower.encoder.layers.*"


class Llava:
    """See `dhp.models.family.Family`. A grid is (1, rows, columns) of patches, the same for every image."""

    vision_modules = ("model.vision_tower", "model.multi_modal_projector")
    text_modules = ("model.language_model", "lm_head")
    text_kv_projections = tuple(f"model.language_model.layers.*.self_attn.{p}_proj" for p in "kv")
    vision_tensor_plan = {
        **{f"{_TOWER}.self_attn.{p}_proj": "colwise" for p in "qkv"},
        f"{_TOWER}.self_attn.out_proj": "rowwise",
        f"{_TOWER}.mlp.fc1": "colwise",
        f"{_TOWER}.mlp.fc2": "rowwise",
        "model.multi_modal_projector.linear_1": "colwise",
        "model.multi_modal_projector.linear_2": "rowwise",
    }
    vision_fused: dict[str, int] = {}
    vision_knee = float("inf")  # every image costs the same
    merge_unit = 1

    def __init__(self, config: Any):
        """Raises ModelError for a tower that hands over its class token as an image token."""
        self.config = config
        vision, text = config.vision_config, config.get_text_config()
        if config.vision_feature_select_strategy != "default":
            raise ModelError(
                f"vision_feature_select_strategy={config.vision_feature_select_strategy} is not supported: only "
                "default, which leaves the class token out. Set it in the model's config.json"
            )
        self.vision_heads = vision.num_attention_heads
        self.text_heads = text.num_attention_heads
        self.text_kv_heads = text.num_key_value_heads
        self.image_token_id = config.image_token_id
        self.video_token_id, self.frames_per_patch = None, 1
        self._patch, self._side = vision.patch_size, vision.image_size // vision.patch_size
        self._channels = vision.num_channels
        self.patch_dim = self._channels * self._patch**2
        self.dummy_patches = self._side**2
        self.vision_work, self.text_work = self._vision_work(), text_work(text)
        self.vision_layers = LayerParts(
            "model.vision_tower.encoder.layers",
            tuple(f"self_attn.{p}_proj" for p in ("q", "k", "v", "out")),
            ("mlp.fc1",),
            ("image",) * vision.num_hidden_layers,
        )
        self.text_layers = LayerParts(
            "model.language_model.layers",
            tuple(f"self_attn.{p}_proj" for p in "qkvo"),
            ("mlp.gate_proj", "mlp.up_proj"),
            ("causal",) * text.num_hidden_layers,
        )

    def split_vision_heads(self, model: PreTrainedModel, ranks: int) -> None:
        """Nothing: CLIP's attention takes as many heads as its projections give."""

    def share_kv_heads(self, model: PreTrainedModel, ranks: int) -> None:
        for layer in model.model.language_model.layers:
            layer.self_attn.num_key_value_groups = self.text_heads // ranks

    def freeze_unused(self, model: PreTrainedModel) -> None:
        tower = model.model.vision_tower
        for module in (*tower.encoder.layers[max(self._features()) :], tower.post_layernorm):
            module.requires_grad_(False)

    def image_tokens(self, grid: Grid) -> int:
        t, h, w = grid
        return t * h * w

    def image_layout(self, grid: Grid) -> ImageLayout:
        t, h, w = grid
        patches = t * h * w
        each = (h * w,) * t
        return ImageLayout(torch.arange(patches), 1, each, each, torch.zeros(patches, 2, dtype=torch.long))

    def patches(self, output: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Grid]:
        images, side, patch = output["pixel_values"], self._side, self._patch
        tiles = images.reshape(len(images), self._channels, side, patch, side, patch)
        rows = tiles.transpose(0, 2, 4, 1, 3, 5).reshape(-1, self.patch_dim)
        return np.ascontiguousarray(rows, dtype=np.float32), (len(images), side, side)

    def video_patches(self, output: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Grid]:
        raise NotImplementedError("LLaVA sees no videos")

    def plain_inputs(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {key: named[key] for key in ("input_ids", "labels", "position_ids") if key in named}
        return kept | ({"pixel_values": self._images(named["pixel_values"])} if "pixel_values" in named else {})

    def position_ids(
        self,
        input_ids: Tensor,
        mm_token_type_ids: Tensor,
        grids: Tensor | None,
        lengths: Tensor,
        video_grids: Tensor | None = None,
        video_seconds: Tensor | None = None,
    ) -> Tensor:
        return torch.arange(input_ids.shape[1]).expand_as(input_ids).contiguous()

    def use_attention(self, model: PreTrainedModel, name: str) -> None:
        # Attention stays: images are rows of a batch, and PyTorch's takes them at once.
        project_as_product(model.model.vision_tower.embeddings.patch_embedding)

    def encode(self, model: PreTrainedModel, pixels: Tensor, positions: Tensor, windows: Any, frames: Any) -> Tensor:
        images = self._images(pixels.to(model.dtype))
        return torch.cat(model.model.get_image_features(images, return_dict=True).pooler_output)

    def use_text_attention(self, model: PreTrainedModel, name: str) -> None:
        model.model.language_model.config._attn_implementation_internal = name

    def hidden_states(self, model: PreTrainedModel, inputs: DecoderInputs, **extra: Any) -> Tensor:
        return last_hidden_states(model, inputs, **extra)

    def _features(self) -> list[int]:
        """After how many layers the tower's states are taken, for each time that they are."""
        chosen, layers = self.config.vision_feature_layer, self.config.vision_config.num_hidden_layers
        # hidden_states[0] is what the first layer gets.
        return [c if c >= 0 else layers + 1 + c for c in ([chosen] if isinstance(chosen, int) else chosen)]

    def _vision_work(self) -> VisionWork:
        vision, features = self.config.vision_config, self._features()
        width, layers, text = vision.hidden_size, max(features), self.config.get_text_config().hidden_size
        return VisionWork(
            patch=self.patch_dim * width,
            token=layers * width * (4 * width + 2 * vision.intermediate_size),
            window_pair=0,
            segment_pair=layers * 2 * width,
            embedding=text * (len(features) * width + text),
            beside=1,  # the class token
        )

    def _images(self, rows: Tensor) -> Tensor:
        """[images × patches, values] → [images, channels, height, width]."""
        side, patch = self._side, self._patch
        tiles = rows.view(-1, side, side, self._channels, patch, patch)
        return tiles.permute(0, 3, 1, 4, 2, 5).reshape(-1, self._channels, side * patch, side * patch)
