"""Which adapters a part may have, in which layout."""

from __future__ import annotations

from dhp.base.errors import ConfigError
from dhp.config.part import LoraConfig, PartConfig
from dhp.config.ranges import require, require_positive


def check_lora(name: str, part: PartConfig) -> None:
    """Raises ConfigError for values out of range, and for layouts in which adapters would not be exact. part: with
    degrees."""
    lora, key = part.lora, f"{name}.lora"
    require(lora.rank >= 0, f"{key}.rank", lora.rank, "rank >= 0; 0 is none")
    if not lora.rank:
        if lora != LoraConfig():
            raise ConfigError(f"{key} has settings, but {key}.rank=0: there are no adapters. Set {key}.rank, as 16")
        return
    require_positive(f"{key}.alpha", float(lora.alpha or 0.0))
    require(0.0 <= lora.dropout < 1.0, f"{key}.dropout", lora.dropout, "0 <= dropout < 1")
    if part.parallelism == "autotp":
        raise ConfigError(
            f"{key}.rank={lora.rank} with {name}.parallelism=autotp: DeepSpeed puts layers of its own in the place of "
            f"those that adapters stand beside. Set {name}.parallelism=tensor."
        )
    if lora.dora and ((part.tensor or 1) > 1 or part.zero_stage):
        raise ConfigError(
            f"{key}.dora=true with {name}.tensor={part.tensor} and {name}.zero_stage={part.zero_stage}: it takes the "
            "norms of whole rows of a matrix, of which each actor has a part. Set "
            f"{name}.tensor=1 and {name}.zero_stage=0, or {key}.dora=false."
        )
