"""LLaVA: a CLIP or SigLIP tower and an ordinary decoder.

Images are independent, so the ranks that share a "sequence" here share the images of a micro-batch: stage one of
two-stage sharding (LongVILA, Chen et al. 2024, section 3.2), without any communication in the tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dhp.core.batch import Grid, ProcessorOutput
from dhp.models.decoder import Decoder
from dhp.models.family import Family
from dhp.models.flops import VisionWork
from dhp.models.processor import Processor
from dhp.models.tower import EMBEDDINGS, Tower, TowerInputs, project_as_product
from dhp.models.types import ImageLayout, LayerParts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOWER = "model.vision_tower.encoder.layers.*"


def llava(config: Any) -> Family:
    """LLaVA of that configuration, with a tower of one size whose class token is left out."""
    return Family(config, LlavaProcessor(config), LlavaTower(config), Decoder(config))


class LlavaProcessor(Processor):
    """A grid is (1, rows, columns) of patches, the same for every image."""

    def __init__(self, config: Any):
        super().__init__(config)
        self._shape = TileShape(config.vision_config)
        self.patch_dim = self._shape.patch_dim

    def patches(self, output: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Grid]:
        images, shape = output["pixel_values"], self._shape
        tiles = images.reshape(len(images), shape.channels, shape.side, shape.patch, shape.side, shape.patch)
        rows = tiles.transpose(0, 2, 4, 1, 3, 5).reshape(-1, shape.patch_dim)
        return np.ascontiguousarray(rows, dtype=np.float32), (len(images), shape.side, shape.side)

    def frames(self, pixels: np.ndarray, grid: Grid | ProcessorOutput, moving: bool = False) -> np.ndarray | None:
        return self._shape.images(torch.from_numpy(pixels)).numpy().transpose(0, 2, 3, 1)

    def from_patches(self, grid: Grid | ProcessorOutput) -> bool:
        """See `Processor`. Patches were cut here."""
        return False

    def plain_inputs(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {key: named[key] for key in ("input_ids", "labels", "position_ids") if key in named}
        return kept | ({"pixel_values": self._shape.images(named["pixel_values"])} if "pixel_values" in named else {})


class LlavaTower(Tower):
    """A batch of images of one size."""

    modules = ("model.vision_tower", "model.multi_modal_projector")
    projector = ("model.multi_modal_projector",)
    takes_attention = False
    tensor_plan = {
        **{f"{_TOWER}.self_attn.{p}_proj": "colwise" for p in "qkv"},
        f"{_TOWER}.self_attn.out_proj": "rowwise",
        f"{_TOWER}.mlp.fc1": "colwise",
        f"{_TOWER}.mlp.fc2": "rowwise",
        "model.multi_modal_projector.linear_1": "colwise",
        "model.multi_modal_projector.linear_2": "rowwise",
    }

    def __init__(self, config: Any):
        super().__init__(config)
        vision = config.vision_config
        self.heads = vision.num_attention_heads
        self._shape = TileShape(vision)
        self.patch_dim, self.dummy_patches = self._shape.patch_dim, self._shape.side**2
        self.tile = self.dummy_patches
        self.work = self._count_work()
        self.layers = LayerParts(
            "model.vision_tower.encoder.layers",
            tuple(f"self_attn.{p}_proj" for p in ("q", "k", "v", "out")),
            ("mlp.fc1",),
            ("image",) * vision.num_hidden_layers,
        )

    def image_layout(self, grid: Grid | ProcessorOutput) -> ImageLayout:
        t, h, w = grid
        patches = t * h * w
        each = (h * w,) * t
        return ImageLayout(torch.arange(patches), 1, each, each, torch.zeros(patches, 2, dtype=torch.long))

    def encode(self, model: PreTrainedModel, inputs: TowerInputs) -> dict[str, Tensor]:
        images = self._shape.images(inputs.pixels.to(model.dtype))
        return {EMBEDDINGS: torch.cat(model.model.get_image_features(images, return_dict=True).pooler_output)}

    def use_attention(self, model: PreTrainedModel, name: str) -> None:
        # Attention is kept: images are rows of a batch, which PyTorch's takes at once.
        project_as_product(model.model.vision_tower.embeddings.patch_embedding)

    def freeze_unused(self, model: PreTrainedModel) -> None:
        tower = model.model.vision_tower
        for module in (*tower.encoder.layers[max(self._features()) :], tower.post_layernorm):
            module.requires_grad_(False)

    def _features(self) -> list[int]:
        """The numbers of layers after which the tower's states are taken."""
        chosen, layers = self.config.vision_feature_layer, self.config.vision_config.num_hidden_layers
        # hidden_states[0] is the input of the first layer.
        return [c if c >= 0 else layers + 1 + c for c in ([chosen] if isinstance(chosen, int) else chosen)]

    def _count_work(self) -> VisionWork:
        vision, features = self.config.vision_config, self._features()
        width, layers, text = vision.hidden_size, max(features), self.config.get_text_config().hidden_size
        return VisionWork(
            patch=self.patch_dim * width,
            token=layers * width * (4 * width + 2 * vision.intermediate_size),
            window_pair=0,
            segment_pair=layers * 2 * width,
            embedding=text * (len(features) * width + text),
            extra_tokens=1,  # the class token
        )


class TileShape:
    """How an image of the tower's one size is cut into patches."""

    def __init__(self, vision: Any):
        self.patch, self.side = vision.patch_size, vision.image_size // vision.patch_size  # pixels, patches
        self.channels = vision.num_channels
        self.patch_dim = self.channels * self.patch**2

    def images(self, rows: Tensor) -> Tensor:
        """[images × patches, values] → [images, channels, height, width]."""
        side, patch = self.side, self.patch
        tiles = rows.view(-1, side, side, self.channels, patch, patch)
        return tiles.permute(0, 3, 1, 4, 2, 5).reshape(-1, self.channels, side * patch, side * patch)
