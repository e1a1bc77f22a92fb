"""Qwen2-VL: a tower that attends to whole frames."""

from typing import Any

from dhp.models.contract.find import find_contract
from dhp.models.decoder import Decoder
from dhp.models.families.grid import GridProcessor, GridTower
from dhp.models.family import Family


def qwen2_vl(config: Any) -> Family:
    """Qwen2-VL of that configuration."""
    contract = find_contract(config)
    tower = Qwen2VlTower(config, contract.vision_work)
    return Family(config, GridProcessor(config, contract.base), tower, Decoder(config))


class Qwen2VlTower(GridTower):
    """It learns no positions: of a patch it takes row and column alone."""

    tensor_plan = {
        "model.visual.blocks.*.attn.proj": "rowwise",
        "model.visual.blocks.*.mlp.fc1": "colwise",
        "model.visual.blocks.*.mlp.fc2": "rowwise",
        "model.visual.merger.mlp.0": "colwise",
        "model.visual.merger.mlp.2": "rowwise",
    }
