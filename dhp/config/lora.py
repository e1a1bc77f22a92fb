"""Ranges of the settings of adapters."""

from __future__ import annotations

from dataclasses import replace

from dhp.config.part import LoraConfig, PartConfig
from dhp.config.parts import HEARING
from dhp.config.ranges import require, require_choice, require_positive
from dhp.core.errors import ConfigError
from dhp.core.parameters import NF4


def resolve_lora(lora: LoraConfig) -> LoraConfig:
    """The same with its alpha a number, where there are adapters."""
    return replace(lora, alpha=2.0 * lora.rank) if lora.rank and lora.alpha is None else lora


def check_lora(name: str, part: PartConfig) -> None:
    """Raises ConfigError for values out of range. Which layouts have adapters is in `dhp.config.rules.PART_RULES`."""
    lora, key = part.lora, f"{name}.lora"
    require(lora.rank >= 0, f"{key}.rank", lora.rank, "rank >= 0; 0 is none")
    if not lora.rank:
        if lora != LoraConfig():
            raise ConfigError(f"{key} has settings, but {key}.rank=0: there are no adapters. Set {key}.rank, as 16")
        return
    require_positive(f"{key}.alpha", float(lora.alpha or 0.0))
    require(0.0 <= lora.dropout < 1.0, f"{key}.dropout", lora.dropout, "0 <= dropout < 1")
    if lora.quantization is not None:
        require_choice(f"{key}.quantization", lora.quantization, (NF4,))
        if name == HEARING:
            raise ConfigError(
                f"{key}.quantization={lora.quantization}: layers of audio towers were never tested in four bits. Leave "
                f"{key}.quantization out."
            )
