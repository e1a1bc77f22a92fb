"""A tiny random model of any declared family, saved as an ordinary Hugging Face directory that can be trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dhp.config.suggestions import did_you_mean, nearest
from dhp.core.errors import ModelError
from dhp.core.files import new_folder, write_whole
from dhp.tiny.families import FAMILIES
from dhp.tiny.looks import LOOKS, Look

POSITIONS = 4096
SPREAD = 0.2  # standard deviation of the decoder's weights: with the usual 0.02 a narrow one likes all tokens alike
VIDEO = "{%- elif part['type'] == 'video' -%}"
RATE, MEL_BINS = 16_000, 16  # samples a second of sound; of its spectrum
# What the tokenizer learns its words from; whatever else is written is spelled in bytes.
CORPUS = ("What is in the picture? What colour is the shape? A red square and 12 blue circles. Which one is it?",)


def family_names() -> list[str]:
    """Families that can be made here, by their model types."""
    return sorted(name for name, look in LOOKS.items() if look.needs is None)


def make_family(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the model, its tokenizer and its processors to a new folder; return it. name: a model type.

    The same seed gives the same files. Raises ModelError for another name, with the nearest one, and for a folder that
    exists.
    """
    look = _look(name)
    if folder.exists():
        raise ModelError(f"{folder} exists; name a new directory")
    import torch
    import transformers
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    from dhp.models.config_file import save_model, write_tokenizer_config
    from dhp.models.pretrained import name_accelerator

    logging.disable_progress_bar()  # small files
    tokenizer = _tokenizer(look)
    config = _config(name, look, tokenizer)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for matrix in (one for one in model.parameters() if one.ndim >= 2 and not one.any()):
                matrix.normal_(0, SPREAD)  # a projector of zeros would hide the tower from all but itself
    ends = {one: getattr(config.get_text_config(), one) for one in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = transformers.GenerationConfig(**ends)
    name_accelerator()
    with new_folder(folder) as partial:
        save_model(model, partial)
        tokenizer.save_pretrained(partial)
        write_tokenizer_config(partial)
        _write_processors(name, look, partial)
    return folder


def _look(name: str) -> Look:
    look = LOOKS.get(name)
    if look is None:
        near = did_you_mean([nearest(name, LOOKS)])
        raise ModelError(f"{name} is no declared family{near}\n  those that can be made: {', '.join(family_names())}")
    if look.needs is not None:
        raise ModelError(
            f"{name}: its processor needs {look.needs}, which dhp does not depend on, so that no tiny model of it is "
            f"made. Those that can be: {', '.join(family_names())}"
        )
    return look


def _tokenizer(look: Look) -> Any:
    from dhp.tiny.model import CHAT_TEMPLATE, make_tokenizer

    tokenizer = make_tokenizer(CORPUS, 400)
    tokens = dict.fromkeys([*look.ids.values(), *look.named.values(), *look.more])
    new = [token for token in tokens if token not in tokenizer.get_vocab()]
    tokenizer.add_special_tokens({"additional_special_tokens": new}, replace_extra_special_tokens=False)
    if look.named:
        tokenizer._set_model_specific_special_tokens(dict(look.named))
    own = "<|vision_start|><|image_pad|><|vision_end|>"
    template = CHAT_TEMPLATE.replace(f"'{own}'", repr(look.image))
    sound = "".join(look.named.get(key, "") for key in ("audio_bos_token", "audio_token", "audio_eos_token"))
    if sound:
        template = template.replace(VIDEO, f"{{%- elif part['type'] == 'audio' -%}}\n{{{{ '{sound}' }}}}\n{VIDEO}")
    tokenizer.chat_template = template
    return tokenizer


def _config(name: str, look: Look, tokenizer: Any) -> Any:
    """The tiny configuration with the tokenizer's numbers in the place of its own."""
    from transformers import CONFIG_MAPPING

    model_type, arguments = next(one for one in FAMILIES.values() if one[0] == name)
    number = tokenizer.convert_tokens_to_ids
    rows = (len(tokenizer) // 16 + 1) * 16  # for every token, divisible by any tensor degree
    ends = {"bos_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    ends["pad_token_id"] = tokenizer.pad_token_id
    text = _sized(arguments["text_config"], rows) | ends | {"max_position_embeddings": POSITIONS}
    text["initializer_range"] = SPREAD
    given = _sized(arguments, rows) | {"text_config": text}
    given |= {key: number(token) for key, token in look.ids.items()}
    if "visual_indicator_token_ids" in given:
        given["visual_indicator_token_ids"] = [number(token) for token in look.more[1:]]
    return CONFIG_MAPPING[model_type](**given)


def _sized(section: Mapping[str, Any], rows: int) -> dict[str, Any]:
    return {key: rows if key.startswith("vocab_size") else value for key, value in section.items()}


def _write_processors(name: str, look: Look, folder: Path) -> None:
    """preprocessor_config.json, in which sound is read too where the family hears; processor_config.json where the
    library's processor reads the family."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind, arguments = look.pictures
    settings = getattr(transformers, kind)(**arguments).to_dict()
    if "audio_token" in look.named:
        settings |= transformers.WhisperFeatureExtractor(feature_size=MEL_BINS, sampling_rate=RATE).to_dict()
    write_whole(folder / "preprocessor_config.json", json.dumps(settings, indent=2) + "\n")
    if look.processor is not None:
        own = {"processor_class": PROCESSOR_MAPPING[transformers.CONFIG_MAPPING[name]].__name__, **look.processor}
        write_whole(folder / "processor_config.json", json.dumps(own, indent=2) + "\n")
