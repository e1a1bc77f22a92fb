"""Joins a tower and a decoder into a LLaVA."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from dhp.core.errors import ModelError
from dhp.core.files import new_folder
from dhp.core.transformers_private import has_class
from dhp.models.config_file import save_model, write_tokenizer_config
from dhp.models.contract.contract import without_weights
from dhp.models.pretrained import load_image_processor, load_tokenizer, name_accelerator
from dhp.models.registry import load_family

IMAGE_TOKENS = ("<image>", "<|image_pad|>", "<|image|>", "[IMG]")  # the first that a tokenizer has, else the first

# Contents that are lists of parts become text, before the decoder's own template sees them.
_FLATTEN = """\
{%- set flat = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message['content'] is string or message['content'] is none or message['content'] is undefined -%}
{%- set flat.messages = flat.messages + [message] -%}
{%- else -%}
{%- set text = namespace(value='') -%}
{%- for part in message['content'] -%}
{%- set text.value = text.value + ('IMAGE\\n' if part['type'] == 'image' else part['text']) -%}
{%- endfor -%}
{%- set flat.messages = flat.messages + [dict(message, content=text.value)] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = flat.messages -%}
"""
# Of a decoder without a template: LLaVA's (Vicuna's).
_PLAIN = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{ message['content'] + ' ' }}
{%- elif message['role'] == 'user' -%}
{{ 'USER: ' + message['content'] + ' ' }}
{%- else -%}
{{ 'ASSISTANT: ' + message['content'] + eos_token }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT: ' }}{%- endif -%}
"""


def add_image_token(tokenizer: Any) -> str:
    """The token that stands for an image: one that the tokenizer has, or a new one."""
    known = tokenizer.get_vocab()
    found = next((token for token in IMAGE_TOKENS if token in known), None)
    if found is None:
        found = IMAGE_TOKENS[0]
        tokenizer.add_special_tokens({"additional_special_tokens": [found]}, replace_extra_special_tokens=False)
    return found


def written_with_images(tokenizer: Any, token: str) -> str:
    """The tokenizer's chat template, or a plain one where it has none, with an image written as the token and a line
    break."""
    own = tokenizer.chat_template
    if isinstance(own, dict):  # several by name
        own = tokenizer.get_chat_template()
    return _FLATTEN.replace("IMAGE", token) + (own or _PLAIN)


FEATURE_LAYER = -2  # LLaVA's: the last layer of a tower is trained for its own objective
PROBE_TOKENS = 8
SAME = 1e-3  # of the largest logit: what bfloat16 and float16 round differently when a decoder is called otherwise


@dataclass(frozen=True)
class Composed:
    """What was written. parameters: of each part. image_tokens: of a picture, of `side` pixels each way."""

    folder: Path
    parameters: dict[str, int]
    image_token: str
    image_tokens: int
    side: int


def compose(vision: str, text: str, out: Path, seed: int = 0, projector: Path | None = None) -> Composed:
    """Write the model as an ordinary Hugging Face directory that is new: both checkpoints' weights, a projector with
    random ones, the decoder's tokenizer with a token for images, a processor and a chat template that shows them.

    vision, text: directories or hub ids. projector: a safetensors file of its weights, by LLaVA's names
    (linear_1.weight, linear_1.bias, linear_2.weight, linear_2.bias). Raises ModelError for what does not go together,
    and says why."""
    if out.exists():
        raise ModelError(f"{out} exists; name a new directory")
    tower_config, text_config = _tower_config(vision), _text_config(text)
    images, tokenizer = load_image_processor(vision), load_tokenizer(text, chat_template="")
    token = add_image_token(tokenizer)
    grown = copy.deepcopy(text_config)  # with a row for each token, as the decoder will have
    grown.vocab_size = max(grown.vocab_size, len(tokenizer))
    _require_family(_config(tower_config, grown, tokenizer.convert_tokens_to_ids(token), "full"), vision, text)
    with _quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():  # the caller's random numbers stay as they were
        torch.manual_seed(seed)
        tower, causal = _load(AutoModel, vision, tower_config), _load(AutoModelForCausalLM, text, text_config)
        _grow(causal, len(tokenizer))
        side, patch = _side(tower_config, vision), int(tower_config.patch_size)
        extra = _count_states(tower, side, vision) - (side // patch) ** 2
        strategy = "default" if extra == 1 else "full"  # one more than patches: the class token, which LLaVA drops
        config = _config(tower_config, causal.config, tokenizer.convert_tokens_to_ids(token), strategy)
        model = _join(config, tower.to(causal.dtype), causal, text)
        if projector is not None:
            _read_projector(model.model.multi_modal_projector, projector)
    shown = {"vision_feature_select_strategy": strategy, "num_additional_image_tokens": extra, "image_token": token}
    processor = LlavaProcessor(
        images, tokenizer, patch_size=patch, chat_template=written_with_images(tokenizer, token), **shown
    )
    tokens = _count_tokens(processor, model, side, vision)
    name_accelerator()
    with _quiet(), new_folder(out) as partial:
        save_model(model, partial)
        processor.save_pretrained(partial)
        write_tokenizer_config(partial)
    return Composed(out, _sizes(model), token, tokens, side)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's bars and its list of what it left out, such as the half of CLIP that reads."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _tower_config(vision: str) -> PreTrainedConfig:
    """The configuration of the tower: of a model of images and texts such as CLIP, its half that sees."""
    config = _read(vision)
    if has_class(AutoModelForImageTextToText, type(config)):
        raise ModelError(
            f"vision={vision}: {config.model_type} is a vision-language model by itself, and is trained as it is. To "
            "compose one, give a tower: a checkpoint of CLIP, SigLIP, DINOv2, ViT or the like"
        )
    tower = getattr(config, "vision_config", config)
    if not isinstance(getattr(tower, "patch_size", None), int) or not has_class(AutoModel, type(tower)):
        raise ModelError(
            f"vision={vision}: {config.model_type} is no tower that cuts pictures of one size into patches. Give a "
            "checkpoint of CLIP, SigLIP, DINOv2, ViT or the like"
        )
    return tower


def _text_config(text: str) -> PreTrainedConfig:
    config = _read(text)
    if has_class(AutoModelForImageTextToText, type(config)) or hasattr(config, "vision_config"):
        raise ModelError(
            f"text={text}: {config.model_type} has a vision tower of its own, and is trained as it is. To compose a "
            "model, give a decoder of text alone: Llama, Qwen2, Qwen3, Mistral or the like"
        )
    if not has_class(AutoModelForCausalLM, type(config)):
        raise ModelError(
            f"text={text}: {config.model_type} is no decoder that transformers can load by AutoModelForCausalLM. Give "
            "one of Llama, Qwen2, Qwen3, Mistral or the like"
        )
    return config


def _read(source: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{source}: no usable model configuration: {str(error).strip()}") from error


def _config(tower: PreTrainedConfig, text: PreTrainedConfig, token: int, strategy: str) -> LlavaConfig:
    return LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=token,
        vision_feature_layer=FEATURE_LAYER,
        vision_feature_select_strategy=strategy,
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        **{name: getattr(text, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def _require_family(config: LlavaConfig, vision: str, text: str) -> None:
    """Before any weight is read: raises ModelError where dhp could not train the result."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="dhp_compose_") as folder:
        config.save_pretrained(folder)
        try:
            load_family(folder)
        except ModelError as error:
            reason = str(error).removeprefix(f"{folder}: ")
            raise ModelError(f"vision={vision} with text={text} could not be trained: {reason}") from error


def _load(kind: Any, source: str, config: PreTrainedConfig) -> PreTrainedModel:
    """With the checkpoint's own weights in its own number format. Raises ModelError where some are missing."""
    try:
        model, info = kind.from_pretrained(
            source, config=config, dtype="auto", trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{source}: its weights cannot be read: {str(error).strip()[:500]}") from error
    missing = sorted(name for name in info["missing_keys"] if "pool" not in name)  # which LLaVA does not run
    if missing:
        raise ModelError(
            f"{source}: its checkpoint lacks {len(missing)} weights of {type(model).__name__}, as {missing[0]}, which "
            "would stay random. Is it a checkpoint of this model?"
        )
    return model.eval()


def _grow(causal: PreTrainedModel, tokens: int) -> None:
    """Rows for every token, a new one with the mean of the others: no row of any size is likelier than they."""
    before = causal.get_input_embeddings().num_embeddings
    if tokens <= before:
        return
    causal.resize_token_embeddings(tokens, pad_to_multiple_of=64, mean_resizing=False)
    for module in {id(one): one for one in (causal.get_input_embeddings(), causal.get_output_embeddings())}.values():
        module.weight[before:] = module.weight[:before].float().mean(0).to(module.weight.dtype)


def _side(config: PreTrainedConfig, vision: str) -> int:
    side = getattr(config, "image_size", None)
    if not isinstance(side, int):
        raise ModelError(f"vision={vision}: its image_size is {side}; LLaVA's towers see square pictures of one size")
    return side


def _count_states(tower: PreTrainedModel, side: int, vision: str) -> int:
    """Of one picture, behind each layer."""
    pixels = torch.zeros(1, tower.config.num_channels, side, side, dtype=tower.dtype)
    try:
        states = tower(pixel_values=pixels, output_hidden_states=True, return_dict=True).hidden_states[FEATURE_LAYER]
    except Exception as error:  # a tower of another kind may fail anyhow
        raise ModelError(
            f"vision={vision}: {type(tower).__name__} gives no states of a picture of {side} × {side} pixels "
            f"({type(error).__name__}: {str(error).strip()[:200]})"
        ) from error
    return int(states.shape[1])


def _join(config: LlavaConfig, tower: PreTrainedModel, causal: PreTrainedModel, text: str) -> PreTrainedModel:
    decoder, head = causal.get_decoder(), causal.get_output_embeddings()
    model: Any = without_weights(config)
    projector = type(model.model.multi_modal_projector)
    if type(model.model.language_model) is not type(decoder) or type(head) is not nn.Linear or head.bias is not None:
        raise ModelError(
            f"text={text}: {type(causal).__name__} is not a decoder with one matrix behind it, as LLaVA has it"
        )
    model.model.vision_tower, model.model.language_model, model.lm_head = tower, decoder, head
    with torch.enable_grad():  # parameters that require a gradient, as the others do
        model.model.multi_modal_projector = projector(config).to(causal.dtype)
    model.generation_config = causal.generation_config
    _require_same_logits(model.eval(), causal, text)
    return model


def _read_projector(module: nn.Module, file: Path) -> None:
    """Give the projector a file's weights. Raises ModelError for others than it has, in names or shapes."""
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"projector={file}: no safetensors file that can be read: {error}") from error
    wanted = {name: tuple(one.shape) for name, one in module.state_dict().items()}
    held = {name: tuple(one.shape) for name, one in found.items()}
    if held != wanted:
        raise ModelError(
            f"projector={file} has {_named(held)}, and this tower and decoder need {_named(wanted)}. Give one that was "
            "trained between the same two, or leave projector= out for random weights"
        )
    module.load_state_dict(found)


def _named(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items())) or "no weights"


def _require_same_logits(model: PreTrainedModel, causal: PreTrainedModel, text: str) -> None:
    """Without a picture the model is its decoder. Raises ModelError where LLaVA's class leaves something of it out, as
    a scale of the logits, or a soft cap, which small logits do not show."""
    capped = getattr(causal.config, "final_logit_softcapping", None)
    ids = torch.arange(PROBE_TOKENS)[None] + 3
    wanted, found = (one(input_ids=ids, use_cache=False).logits.float() for one in (causal, model))
    apart = float((wanted - found).abs().max() / wanted.abs().max().clamp(min=1e-9))
    why = f"a soft cap at {capped}" if capped else f"they differ by {apart:.1%}"
    if capped or not apart <= SAME:
        raise ModelError(
            f"text={text}: {type(causal).__name__} computes logits in a way that LLaVA's class does not have ({why}). "
            "Take a decoder whose logits are one product, as Llama, Qwen2, Qwen3 or Mistral"
        )


def _count_tokens(processor: LlavaProcessor, model: Any, side: int, vision: str) -> int:
    """Of one picture, by the processor and by the tower. Raises ModelError where they differ."""
    from PIL import Image

    pixels = processor.image_processor(Image.new("RGB", (side, side // 2)), return_tensors="pt")["pixel_values"]
    shown = processor.replace_image_token({"pixel_values": pixels}, 0).count(processor.image_token)
    seen = None
    with suppress(Exception), torch.no_grad():  # of another size than the tower's it may fail anyhow
        seen = len(model.model.get_image_features(pixels.to(model.dtype), return_dict=True).pooler_output[0])
    if shown != seen:
        raise ModelError(
            f"vision={vision}: its image processor makes pictures of {tuple(pixels.shape[-2:])} pixels, {shown} "
            f"tokens, and the tower sees {side} × {side}, {seen or 'other'} tokens. Set size and crop_size in its "
            "preprocessor_config.json"
        )
    return shown


def _sizes(model: Any) -> dict[str, int]:
    base = model.model
    parts = {"vision": base.vision_tower, "projector": base.multi_modal_projector, "text": base.language_model}
    sizes = {name: sum(one.numel() for one in part.parameters()) for name, part in parts.items()}
    tied = model.lm_head.weight is base.language_model.get_input_embeddings().weight
    return sizes | {"text": sizes["text"] + (0 if tied else model.lm_head.weight.numel())}
