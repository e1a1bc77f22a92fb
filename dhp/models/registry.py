"""The model families that can be split, by the `model_type` of config.json."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dhp.base.errors import ModelError

if TYPE_CHECKING:
    from dhp.models.family import Family


WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
# Model type → the module of dhp.models that has its adapter, and its name there. Imported when asked for, as modeling
# code takes a second.
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

    A family without an adapter of its own is run by transformers' contract (dhp/models/generic). Raises ModelError when
    there is no readable config.json, and for a family that cannot be run so.
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
            family: Family = getattr(import_module(f"dhp.models.{module}"), name)(config)
            return family
        from dhp.models.generic.family import generic
        from dhp.models.generic.structure import family_class

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


def load_tokenizer(model_name: str, chat_template: str | None = None) -> Any:
    """The model's own tokenizer, with its chat template, or with the one given (Jinja text; "": none is needed).

    Raises ModelError when the directory has no tokenizer or no chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_name}: no usable tokenizer: {error}") from error
    if chat_template:
        tokenizer.chat_template = chat_template
    elif isinstance(tokenizer.chat_template, dict):  # several by name
        tokenizer.chat_template = tokenizer.get_chat_template()
    if chat_template is None and not tokenizer.chat_template:
        raise ModelError(
            f"{model_name}: the tokenizer has no chat template, so conversations cannot be rendered; "
            "put the model's chat_template.jinja (or chat_template.json) into the directory, or name a file that "
            "holds one by data.chat_template"
        )
    return tokenizer


def load_image_processor(model_name: str) -> Any:
    """The model's own image processor, in the flavour that needs no torchvision.

    Raises ModelError when the directory has none.
    """
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(model_name, backend="pil", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_name}: no usable image processor: {error}") from error


def find_stop_tokens(model_name: str, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: those of the model's generation_config.json, which may name several, or else of its
    config.json, and the tokenizer's, which ends a turn of its chat template."""
    from transformers import GenerationConfig

    try:
        own = GenerationConfig.from_pretrained(model_name).eos_token_id
    except (OSError, ValueError):
        own = config.get_text_config().eos_token_id
    named = [own] if isinstance(own, int) else [*(own or ())]
    return tuple(dict.fromkeys(token for token in (*named, tokenizer.eos_token_id) if token is not None))


def auxiliary_files(model_name: str) -> list[Path]:
    """Everything of a model directory or hub id but its weights and hidden files: configuration, tokenizer, processors,
    templates.

    They are copied into checkpoints and exports, which people publish. Raises ModelError for a link that leads to
    another folder, but that of the hub's cache which has the same model.
    """
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model_name, ignore_patterns=[f"*{end}" for end in WEIGHT_ENDINGS]))
    files = [f for f in folder.iterdir() if f.is_file() and not f.name.endswith(WEIGHT_ENDINGS)]
    own = [folder.resolve()]
    if own[0].parent.name == "snapshots" and own[0].parent.parent.name.startswith("models--"):
        own.append(own[0].parent.parent / "blobs")
    for file in files:
        if not any(file.resolve().is_relative_to(one) for one in own):
            raise ModelError(
                f"{file} leads to {file.resolve()}, and would be copied into checkpoints and exports. Remove the link, "
                "or put a copy in its place"
            )
    return sorted(file for file in files if not file.name.startswith("."))
