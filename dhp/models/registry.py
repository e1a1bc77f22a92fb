"""Which model families can be split, by the `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dhp.base.errors import ModelError

if TYPE_CHECKING:
    from dhp.models.family import Family


def _qwen2_5_vl(config: Any) -> Family:
    from dhp.models.qwen2_5_vl import qwen2_5_vl

    return qwen2_5_vl(config)


def _qwen3_vl(config: Any) -> Family:
    from dhp.models.qwen3_vl import qwen3_vl

    return qwen3_vl(config)


def _qwen3_vl_moe(config: Any) -> Family:
    from dhp.models.qwen3_vl import qwen3_vl_moe

    return qwen3_vl_moe(config)


def _llava(config: Any) -> Family:
    from dhp.models.llava import llava

    return llava(config)


WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
FAMILIES: dict[str, Callable[[Any], Family]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "llava": _llava,
}


def load_family(model_name: str) -> Family:
    """The family of a Hugging Face directory or hub id.

    A family without an adapter of its own is run by transformers' contract (dhp/models/generic). Raises ModelError when
    there is no readable config.json, and for a family that cannot be run so.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_name)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_name}: no usable model configuration: {error}") from error
    if config.model_type in FAMILIES and not _is_unusual(config):
        _refuse_dropout(model_name, config)
        return FAMILIES[config.model_type](config)
    from dhp.models.generic.family import generic
    from dhp.models.generic.structure import family_class

    try:
        family_class(config)  # first, as nothing helps a family without the contract
        _refuse_dropout("its configuration", config)
        return generic(config, model_name)
    except ModelError as error:
        raise ModelError(f"{model_name}: {error}") from error


def _is_unusual(config: Any) -> bool:
    """A LLaVA with a tower or a choice of features that its own adapter does not know."""
    if config.model_type != "llava":
        return False
    known = config.vision_config.model_type in ("clip_vision_model", "siglip_vision_model")
    return not known or config.vision_feature_select_strategy != "default"


def _refuse_dropout(model_name: str, config: Any) -> None:
    """Attention here drops nothing. Raises ModelError for a model that asks for it: it would train as another one."""
    for part in (getattr(config, "vision_config", None), config.get_text_config()):
        dropout = getattr(part, "attention_dropout", 0.0)
        if dropout:
            raise ModelError(
                f"{model_name}: attention_dropout={dropout} of {type(part).__name__} is not supported. Set it to 0 in "
                "the model's config.json"
            )


def load_tokenizer(model_name: str) -> Any:
    """The model's own tokenizer, with its chat template.

    Raises ModelError when the directory has no tokenizer or no chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_name)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_name}: no usable tokenizer: {error}") from error
    if not tokenizer.chat_template:
        raise ModelError(
            f"{model_name}: the tokenizer has no chat template, so conversations cannot be rendered; "
            "put the model's chat_template.jinja (or chat_template.json) into the directory"
        )
    return tokenizer


def load_image_processor(model_name: str) -> Any:
    """The model's own image processor, in the flavour that needs no torchvision.

    Raises ModelError when the directory has none.
    """
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(model_name, backend="pil")
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_name}: no usable image processor: {error}") from error


def auxiliary_files(model_name: str) -> list[Path]:
    """Everything of a model directory or hub id but its weights: configuration, tokenizer, processors, templates."""
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model_name, ignore_patterns=[f"*{end}" for end in WEIGHT_ENDINGS]))
    return sorted(f for f in folder.iterdir() if f.is_file() and not f.name.endswith(WEIGHT_ENDINGS))
