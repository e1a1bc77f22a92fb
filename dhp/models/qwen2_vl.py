"""Qwen2-VL: all layers of its tower attend to whole frames; its decoder is that of Qwen2.5-VL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dhp.models.decoder import Decoder
from dhp.models.family import Family
from dhp.models.flops import VisionWork
from dhp.models.grid.processor import GridProcessor, patch_values
from dhp.models.grid.tower import GridTower

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def qwen2_vl(config: Any) -> Family:
    """Qwen2-VL of that configuration."""
    return Family(config, Qwen2VlProcessor(config), Qwen2VlTower(config), Decoder(config))


class Qwen2VlProcessor(GridProcessor):
    """A video is one run of placeholders; a step in time of it is one further on the first axis of positions."""

    def model(self) -> type[PreTrainedModel]:
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

        return Qwen2VLModel

    def plain_inputs(self, named: dict[str, Any]) -> dict[str, Any]:
        return {name: tensor for name, tensor in named.items() if name != "second_per_grid_ts"}


class Qwen2VlTower(GridTower):
    """Patches have a width of their own, `embed_dim`."""

    tensor_plan = {
        "model.visual.blocks.*.attn.proj": "rowwise",
        "model.visual.blocks.*.mlp.fc1": "colwise",
        "model.visual.blocks.*.mlp.fc2": "rowwise",
        "model.visual.merger.mlp.0": "colwise",
        "model.visual.merger.mlp.2": "rowwise",
    }

    def __init__(self, config: Any):
        super().__init__(config, _count_work(config.vision_config))


def _count_work(vision: Any) -> VisionWork:
    width, merged = vision.embed_dim, vision.embed_dim * vision.spatial_merge_size**2
    return VisionWork(
        patch=patch_values(vision) * width,
        token=vision.depth * width * (4 * width + 2 * int(width * vision.mlp_ratio)),
        window_pair=0,
        segment_pair=vision.depth * 2 * width,
        embedding=merged * (merged + vision.hidden_size),
    )
