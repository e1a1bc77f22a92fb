"""The model families that can be split, by the `model_type` of config.json."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dhp.core.errors import ModelError

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


def load_family(model_name: str) -> Family:
    """The family of a Hugging Face directory or hub id.

    A family without an adapter of its own is run by transformers' contract (dhp/models/contract). Raises ModelError
    when there is no readable config.json, and for a family that cannot be run so.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_name}: no usable model configuration: {error}") from error
    try:
        if config.model_type in FAMILIES and not _is_unusual(config):
            _refuse_dropout(config)
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
