"""A Qwen2.5-VL small enough to train on a CPU, saved as an ordinary Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
)

from dhp.core.errors import ModelError
from dhp.core.files import new_folder
from dhp.models.config_file import save_model, write_tokenizer_config
from dhp.models.pretrained import name_accelerator

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = """\
{%- if messages[0]['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part['type'] == 'video' -%}
{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else -%}
{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def make_tiny_model(folder: Path, corpus: Iterable[str], seed: int = 0) -> Path:
    """Write a randomly initialised model, its tokenizer and its image processor to `folder`; return it.

    corpus: texts to train the tokenizer on. The same corpus and seed give the same files. A folder that
    already holds a model is left as it is; one that holds anything else is a ModelError. The folder
    appears complete or not at all, also when several processes make it at once.
    """
    if not folder.exists():
        with new_folder(folder) as partial:
            _write(partial, corpus, seed)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} exists but holds no model (no config.json). Remove it or choose another folder")
    return folder


def make_tokenizer(corpus: Iterable[str], vocab_size: int = 1024) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with Qwen's special tokens and the ChatML template above.

    vocab_size: entries at most, special tokens not counted; a small corpus gives fewer.
    """
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = normalizers.NFC(), Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    trained = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(merge) for merge in trained["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config(tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLConfig:
    """Sizes that leave every kind of sharding something to do, at about a million parameters.

    8 query heads share 4 key-value heads; windows of 2 × 2 merged patches give even small pictures
    several; two of four vision blocks attend to the whole image.
    """
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    end, turn_end = ids["<|endoftext|>"], ids["<|im_end|>"]
    ends = {"bos_token_id": end, "eos_token_id": turn_end, "pad_token_id": end}
    text = {
        "vocab_size": (len(tokenizer) // 16 + 1) * 16,  # rows for every token, divisible by any tensor degree
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        **ends,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "depth": 4,
        "num_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56,  # pixels: 4 × 4 patches
        "fullatt_block_indexes": [1, 3],
        "out_hidden_size": 128,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        **ends,
    )


def _write(folder: Path, corpus: Iterable[str], seed: int) -> None:
    tokenizer = make_tokenizer(corpus)
    config = tiny_config(tokenizer)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        bos_token_id=config.text_config.bos_token_id,
        eos_token_id=config.text_config.eos_token_id,
        pad_token_id=config.text_config.pad_token_id,
    )
    name_accelerator()
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    write_tokenizer_config(folder)
    Qwen2VLImageProcessorPil(
        patch_size=14, temporal_patch_size=2, merge_size=2, min_pixels=56 * 56, max_pixels=168 * 168
    ).save_pretrained(folder)
