"""A Qwen2.5-VL of this experiment's own size, with random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)
from transformers.utils import logging

from dhp.models.pretrained import name_accelerator
from dhp.tiny.model import SPECIAL_TOKENS, make_tokenizer
from experiments.sight.pictures import SIDE, texts

WIDTH, TOWER_WIDTH = 128, 64
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
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


def make_model(folder: Path, seed: int) -> Path:
    """Write model, tokenizer and image processor to a new folder.

    The projector's last matrix begins at zero: at first every picture looks the same to the decoder, and what tells
    them apart comes by gradients that reach the projector alone.
    """
    tokenizer = make_tokenizer(texts())
    tokenizer.chat_template = TEMPLATE
    config = config_of(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
        last = model.model.visual.merger.mlp[-1]
        torch.nn.init.zeros_(last.weight)
        torch.nn.init.normal_(last.bias, std=0.02)
    text = config.text_config
    model.generation_config = GenerationConfig(
        bos_token_id=text.bos_token_id, eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id
    )
    name_accelerator()
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sides = {"min_pixels": SIDE * SIDE, "max_pixels": SIDE * SIDE}
    Qwen2VLImageProcessorPil(patch_size=14, temporal_patch_size=2, merge_size=2, **sides).save_pretrained(folder)
    return folder


def config_of(tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLConfig:
    """Two layers of decoder, two of tower; windows of 4 × 4 patches, then the whole picture of 6 × 6."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    end, turn_end = ids["<|endoftext|>"], ids["<|im_end|>"]
    ends = {"bos_token_id": end, "eos_token_id": turn_end, "pad_token_id": end}
    text = {
        "vocab_size": (len(tokenizer) // 16 + 1) * 16, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}, **ends,
    }  # fmt: skip
    vision = {
        "hidden_size": TOWER_WIDTH, "intermediate_size": 2 * TOWER_WIDTH, "depth": 2, "num_heads": 4, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56, "fullatt_block_indexes": [1],
        "out_hidden_size": WIDTH,
    }  # fmt: skip
    return Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"], tie_word_embeddings=False, **ends,
    )  # fmt: skip
