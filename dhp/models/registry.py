"""The model families that can be split, by the `model_type` of config.json."""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dhp.core.errors import ModelError
from dhp.models.pretrained import read_model_config

if TYPE_CHECKING:
    from dhp.models.family import Family

# Model type → the module of dhp.models.families that has its adapter, and its name there. Imported when asked for, as
# modeling code takes a second.
FAMILIES: dict[str, tuple[str, str]] = {
    "glm46v": ("glm4v", "glm4v"),
    "glm4v": ("glm4v", "glm4v"),
    "glm4v_moe": ("glm4v", "glm4v"),
    "kimi_k25": ("kimi_k25", "kimi_k25"),
    "llava": ("llava", "llava"),
    "qwen2_5_vl": ("qwen2_5_vl", "qwen2_5_vl"),
    "qwen2_vl": ("qwen2_vl", "qwen2_vl"),
    "qwen3_omni_moe_thinker": ("qwen3_omni", "qwen3_omni"),
    "qwen3_5": ("qwen3_5", "qwen3_5"),
    "qwen3_5_moe": ("qwen3_5", "qwen3_5"),
    "qwen3_vl": ("qwen3_vl", "qwen3_vl"),
    "qwen3_vl_moe": ("qwen3_vl", "qwen3_vl_moe"),
}

# Names of rates in configurations: of dropout and drop path, of layers that are left out, of a router's noise; but for
# those of heads that are not built.
_CHANCE = re.compile("drop|jitter")
_HEADS = re.compile("classif|summary")


def load_family(model_name: str) -> Family:
    """The family of a Hugging Face directory or hub id.

    A family without an adapter of its own is run by transformers' contract (dhp/models/contract). Raises ModelError
    when there is no readable config.json, and for a family that cannot be run so.
    """
    config = read_model_config(model_name)
    try:
        if config.model_type in FAMILIES and not _is_unusual(config):
            _refuse_dropout(config)
            _refuse_chance(config)
            module, name = FAMILIES[config.model_type]
            family: Family = getattr(import_module(f"dhp.models.families.{module}"), name)(config)
            return family
        from dhp.models.contract.family import generic
        from dhp.models.contract.structure import family_class

        family_class(config)  # first, as nothing helps a family without the contract
        _refuse_dropout(config)
        return generic(config, model_name)
    except ModelError as error:
        raise ModelError(f"{model_name}: {error}") from error


def _is_unusual(config: Any) -> bool:
    """A LLaVA with a tower or a choice of features that its own adapter does not know."""
    if config.model_type != "llava":
        return False
    known = config.vision_config.model_type in ("clip_vision_model", "siglip_vision_model")
    return not known or config.vision_feature_select_strategy != "default"


def _refuse_dropout(config: Any) -> None:
    """Attention here drops nothing. Raises ModelError for a model that asks for it: it would train as another one."""
    for part in (getattr(config, "vision_config", None), config.get_text_config()):
        dropout = getattr(part, "attention_dropout", 0.0)
        if dropout:
            raise ModelError(
                f"attention_dropout={dropout} of {type(part).__name__} is not supported. Set it to 0 in "
                "the model's config.json"
            )


def _refuse_chance(config: Any) -> None:
    """Raises ModelError for a configuration whose layers draw random numbers in training: of a family with an adapter
    of its own. Another's layers are run, and their generator looked at (`dhp.models.contract.twin_model`)."""
    parts = [getattr(config, name, None) for name in ("vision_config", "text_config", "audio_config")]
    for part in (one for one in parts if one is not None):
        for name, rate in vars(part).items():
            named = _CHANCE.search(name) and not _HEADS.search(name)
            if named and isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0:
                raise ModelError(
                    f"{name}={rate} of {type(part).__name__}: its layers would draw random numbers in training, and "
                    "what one rank drew no other can draw again, nor a layer that is recomputed. Set it to 0 in the "
                    "model's config.json"
                )
