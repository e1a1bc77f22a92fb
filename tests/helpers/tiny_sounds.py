"""Directories of tiny models without code of their own that hear."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, Gemma4AudioFeatureExtractor, Qwen2_5OmniProcessor

from tests.helpers.tiny_families import save_weights
from tests.helpers.tiny_omni import save_omni
from tests.helpers.tiny_videos import library_processor, save_tiny

HEARING = ("qwen2_5_omni", "gemma4")
_AUDIO = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 32}
_NAMED = {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}


def save_hearing(name: str, folder: Path) -> Any:
    """Write the model to `folder`; the library's processor of it, without its video processor."""
    if name == "qwen2_5_omni":
        folder.mkdir()
        library = save_omni(folder, "qwen2_5_omni_thinker", Qwen2_5OmniProcessor)
        save_weights(AutoConfig.from_pretrained(folder), folder)
        return library
    save_tiny(name, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|audio>", "<audio|>"]}, replace_extra_special_tokens=False
    )
    tokenizer._set_model_specific_special_tokens(_NAMED)
    video = "{%- elif part['type'] == 'video' -%}"
    tokenizer.chat_template = tokenizer.chat_template.replace(
        video, "{%- elif part['type'] == 'audio' -%}\n{{ '<|audio|>' }}\n" + video
    )
    tokenizer.save_pretrained(folder)
    given = json.loads((folder / "config.json").read_text())
    given |= {"audio_config": _AUDIO, "audio_token_id": tokenizer.convert_tokens_to_ids("<|audio|>")}
    given["text_config"] |= {"pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(given))
    save_weights(AutoConfig.from_pretrained(folder), folder)
    sounds = Gemma4AudioFeatureExtractor()
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | json.loads(sounds.to_json_string())))
    return library_processor(name, folder, sounds=sounds)
