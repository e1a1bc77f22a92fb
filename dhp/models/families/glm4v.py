"""GLM-4.1V, GLM-4.6V, GLM-4.5V: towers with learned positions.

The tower is of the kind of Qwen2.5-VL's without windows; its positions are interpolated from a square table."""

from typing import Any

from torch import Tensor

from dhp.models.contract.find import find_contract
from dhp.models.contract.generic_parts import ContractDecoder
from dhp.models.families.grid import GridProcessor, GridTower, runs_of_one_size
from dhp.models.family import Family


def glm4v(config: Any) -> Family:
    """GLM-4.xV of that configuration."""
    contract = find_contract(config)
    tower = Glm4vTower(config, contract.vision_work)
    return Family(config, Glm4vProcessor(config, contract.base), tower, ContractDecoder(config, contract))


class Glm4vProcessor(GridProcessor):
    """A step in time of a video is between the tokens of an image, followed by its time. The library writes images'
    placeholders there; here they stay a video's, so that both may be in one conversation."""

    def __init__(self, config: Any, base: Any):
        super().__init__(config, base)
        self.step_tokens = (config.image_start_token_id, config.image_end_token_id)

    def step_text(self, middle: float, first: float) -> tuple[str, str]:
        return "", f"{first:.1f} seconds" if self.config.model_type == "glm46v" else str(int(first))

    def plain_inputs(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = named["input_ids"]
        return super().plain_inputs(named) | {
            "input_ids": ids.masked_fill(ids == self.video_token_id, self.image_token_id)
        }


class Glm4vTower(GridTower):
    """It looks patches' frames up by cumulative lengths, so that these stay lengths, and the plan of segments is a
    separate argument."""

    projector = ("model.visual.downsample", "model.visual.merger")
    gates = ("mlp.gate_proj", "mlp.up_proj")
    before = ("patch_embed", "post_conv_layernorm", "embeddings")
    behind = ("post_layernorm", "downsample", "merger")
    tensor_plan = {
        "model.visual.blocks.*.attn.proj": "rowwise",
        "model.visual.merger.proj": "dhp_whole",
        "model.visual.merger.post_projection_norm": "dhp_whole",
        **{
            f"model.visual.{part}.{name}_proj": style
            for part in ("blocks.*.mlp", "merger")
            for name, style in (("gate", "colwise"), ("up", "colwise"), ("down", "rowwise"))
        },
    }

    def derive(self, tower: Any, positions: Tensor, windows: Any, frames: Any) -> dict[str, Any]:
        grids, bounds = runs_of_one_size(positions)
        return {"grid_thw": grids, "cu_seqlens": bounds, "segments": frames}
