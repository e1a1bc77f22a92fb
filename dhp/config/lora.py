"""Checks a part's adapters against its layout."""

from __future__ import annotations

from dhp.base.adapters import NF4
from dhp.base.errors import ConfigError
from dhp.config.part import LoraConfig, PartConfig
from dhp.config.parts import HEARING
from dhp.config.ranges import require, require_choice, require_positive


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
    _check_quantization(name, part)
    if lora.dora and ((part.tensor or 1) > 1 or part.zero_stage):
        raise ConfigError(
            f"{key}.dora=true with {name}.tensor={part.tensor} and {name}.zero_stage={part.zero_stage}: it takes the "
            "norms of whole rows of a matrix, of which each actor has a part. Set "
            f"{name}.tensor=1 and {name}.zero_stage=0, or {key}.dora=false."
        )


def _check_quantization(name: str, part: PartConfig) -> None:
    """Check what matrices in four bits can be combined with. Raises ConfigError."""
    key, found = f"{name}.lora.quantization", part.lora.quantization
    if found is None:
        return
    require_choice(key, found, (NF4,))
    if name == HEARING:
        raise ConfigError(f"{key}={found}: layers of audio towers were never tested in four bits. Leave {key} out.")
    whole = "bitsandbytes rounds blocks of whole matrices, of which each actor would have a part"
    rules = {
        "tensor": (part.tensor == 1, "1", whole),
        "expert": (part.expert == 1, "1", whole),
        "zero_stage": (part.zero_stage == 0, "0", "ZeRO copies, casts and cuts weights as numbers, not as packed bits"),
        "dtype": (part.dtype != "float64", "bfloat16", "there is no way back from four bits to float64"),
        "compile": (not part.compile, "false", "bitsandbytes' products in compiled layers were never tested here"),
        "recompute": (
            part.recompute in ("none", "full"),
            "none or full",
            "what a layer keeps is chosen by kinds of products, and bitsandbytes' is none of the known ones",
        ),
        "lora.dora": (
            not part.lora.dora,
            "false",
            "its norms would be those of the weights before they were rounded",
        ),
    }
    for other, (goes, needed, why) in rules.items():
        if not goes:
            value = part.lora.dora if other == "lora.dora" else getattr(part, other)
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(
                f"{key}={found} with {name}.{other}={shown}: {why}. Set {name}.{other}={needed}, or leave {key} out."
            )
