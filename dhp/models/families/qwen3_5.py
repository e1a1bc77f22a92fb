"""Qwen3.5, with or without experts: mostly linear-attention layers.

The tower is Qwen3-VL's without DeepStack features; those layers are gated delta nets (Yang et al. 2025)."""

from typing import Any

from dhp.models.contract.find import find_contract
from dhp.models.contract.generic_parts import ContractDecoder
from dhp.models.families.qwen3_vl import Qwen3VlProcessor, Qwen3VlTower
from dhp.models.family import Family


def qwen3_5(config: Any) -> Family:
    """Qwen3.5 of that configuration."""
    contract = find_contract(config)
    processor = Qwen3VlProcessor(config, contract.base)
    return Family(config, processor, Qwen3VlTower(config), ContractDecoder(config, contract))
