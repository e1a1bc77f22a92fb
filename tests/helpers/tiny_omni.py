"""A tiny Qwen3-Omni thinker as an ordinary directory: weights, tokenizer, image processor and feature extractor."""

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForImageTextToText,
    Qwen2VLImageProcessorPil,
    Qwen3OmniMoeProcessor,
    WhisperFeatureExtractor,
)

from dhp.tiny.tiny_model import CHAT_TEMPLATE, make_tokenizer
from tests.helpers.tiny_families import make_config

RATE = 16_000  # samples a second that the model hears
CORPUS = ["What is in the picture? What do you hear? A high tone, a red square, and 12 blue circles.\n\n"] * 4
NAMED = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "audio_token_id": "<|audio_pad|>",
    "audio_start_token_id": "<|audio_start|>",
    "audio_end_token_id": "<|audio_end|>",
}
_VIDEO = "{%- elif part['type'] == 'video' -%}"
_AUDIO = "{%- elif part['type'] == 'audio' -%}\n{{ '<|audio_start|><|audio_pad|><|audio_end|>' }}\n"


def save_omni(folder: Path, name: str = "qwen3_omni", kind: type = Qwen3OmniMoeProcessor) -> Any:
    """Write the model to `folder`; the library's processor of it, without its video processor."""
    tokenizer = make_tokenizer(CORPUS, 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"]})
    tokenizer._set_model_specific_special_tokens(NAMED)
    tokenizer.chat_template = CHAT_TEMPLATE.replace(_VIDEO, _AUDIO + _VIDEO)
    config = make_config(name)
    for key, token in IDS.items():
        setattr(config, key, tokenizer.convert_tokens_to_ids(token))
    config.text_config.vocab_size = (len(tokenizer) // 16 + 1) * 16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    pictures = Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=2, merge_size=2, min_pixels=16 * 16, max_pixels=48 * 48
    )
    sounds = WhisperFeatureExtractor(feature_size=16, sampling_rate=RATE, chunk_length=20)
    tokenizer.save_pretrained(folder)
    both = pictures.to_dict() | sounds.to_dict()  # in one file, as the published checkpoint has it
    (folder / "preprocessor_config.json").write_text(json.dumps(both))
    own = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    return own(pictures, None, sounds, tokenizer)


def make_wave(seconds: float, seed: int, rate: int = RATE, channels: int = 1) -> np.ndarray:
    """A tone under some noise, int16 [samples, channels]."""
    random, count = np.random.default_rng(seed), round(seconds * rate)
    tone = np.sin(2 * np.pi * (200 + 90 * seed) * np.arange(count) / rate)
    noisy = 0.5 * tone[:, None] + random.normal(size=(count, channels)) * 0.02
    return (noisy * 20_000).astype(np.int16)


def save_wave(path: Path, samples: np.ndarray, rate: int = RATE) -> Path:
    """Write a WAV file of int16 [samples, channels]."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return path
