"""Tiny models and hand-made samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from dhp.core.batch import IGNORED
from dhp.data.sample.sample import Sample

IMAGE_TOKEN, VIDEO_TOKEN = 505, 506


def make_sample(
    grids: Sequence[tuple[int, int, int]],
    tokens: int,
    targets: int,
    seed: int,
    image_token: int,
    unit: int = 4,
    values: int = 3 * 2 * 14 * 14,
    seconds: Sequence[float | None] = (),
    stamped: bool = False,
    video_token: int = VIDEO_TOKEN,
    around: tuple[int, ...] = (),
) -> Sample:
    """A sample with random pixels and text: some text, each image, `tokens` of text whose last `targets` are labels.

    unit: patches of one image token; values: of one patch. seconds: as in Sample; a video has video_token.

    around: tokens before and behind each run of placeholders.
    stamped: two tokens of text, as of a time, come before each step of a video."""
    rng = np.random.default_rng(seed)
    text = lambda n: list(rng.integers(3, 300, n))
    ids: list[int] = text(2)
    kinds = [0, 0]
    for number, (t, h, w) in enumerate(grids):
        still = not seconds or seconds[number] is None
        steps = t if stamped and not still else 1
        for _ in range(steps):
            time = text(2) if stamped and not still else []
            run = [image_token if still else video_token] * (t * h * w // unit // steps)
            ids += time + list(around[:1]) + run + list(around[1:])
            kinds += [0] * len(time + list(around[:1])) + [1 if still else 2] * len(run) + [0] * len(around[1:])
        ids += text(1)
        kinds += [0]
    ids += text(tokens)
    kinds += [0] * tokens
    labels = [IGNORED] * (len(ids) - targets) + ids[len(ids) - targets :]
    pixels = tuple(rng.standard_normal((t * h * w, values)).astype(np.float32) for t, h, w in grids)
    as_array = lambda values: np.array(values, dtype=np.int64)
    rows = (as_array(ids), as_array(labels), as_array(kinds))
    return Sample("made", seed, *rows, pixels, tuple(grids), tuple(seconds))


def save_model(
    folder: Path,
    tied: bool = False,
    text: dict[str, Any] | None = None,
    sharpness: float = 1.0,
    tower: dict[str, Any] | None = None,
) -> Path:
    """A Qwen2.5-VL with random weights: 8 query and 4 key/value heads, 4 vision heads, 2 full-attention blocks.

    sharpness: queries and keys of the decoder are so much larger: small random ones see all tokens alike."""
    decoder = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    } | (text or {})
    config = Qwen2_5_VLConfig(
        text_config=decoder,
        vision_config={
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "window_size": 56,
            "fullatt_block_indexes": [1, 3],
            "out_hidden_size": decoder["hidden_size"],
        }
        | (tower or {}),
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=503,
        vision_end_token_id=504,
        tie_word_embeddings=tied,
    )
    return _save(Qwen2_5_VLForConditionalGeneration, config, folder, sharpness)


def save_qwen3_vl(folder: Path, tied: bool = False, text: dict[str, Any] | None = None) -> Path:
    """A Qwen3-VL with random weights: 4 tower layers, features behind 3 of them, 4 decoder layers with 8 query and 4
    key/value heads, 4 vision heads; a table of 5 × 5 positions."""
    return _save(Qwen3VLForConditionalGeneration, _qwen3_vl_config(Qwen3VLConfig, tied, text or {}), folder)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def save_qwen3_vl_moe(folder: Path, **text: Any) -> Path:
    """The same with experts: 4 in each layer but the second, which is dense; a token visits 2, each 24 wide."""
    more = EXPERTS | {"mlp_only_layers": [1]} | text
    return _save(Qwen3VLMoeForConditionalGeneration, _qwen3_vl_config(Qwen3VLMoeConfig, False, more), folder)


def _qwen3_vl_config(kind: type[PreTrainedConfig], tied: bool, text: dict[str, Any]) -> PreTrainedConfig:
    decoder = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    return kind(
        text_config=decoder | text,
        vision_config={
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "patch_size": 14,
            "out_hidden_size": 64,
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 1, 2],
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=503,
        vision_end_token_id=504,
        tie_word_embeddings=tied,
    )


def save_llava(folder: Path, decoder: type[PreTrainedConfig] = Qwen2Config, **more: Any) -> Path:
    """A LLaVA with random weights: images of 4 × 4 patches, 8 query and 4 key/value heads, 4 vision heads; the tower's
    last layer is not used, as in the released models. more: of the decoder's configuration."""
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    text = decoder(**sizes | more)
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=56, patch_size=14
    )
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE_TOKEN)
    return _save(LlavaForConditionalGeneration, config, folder)


def save_llava_with_head_norms(folder: Path) -> Path:
    """A LLaVA whose decoder normalizes each query and key head (Qwen3): all ranks hold that norm, each sees its own
    heads."""
    return save_llava(folder, Qwen3Config, head_dim=8)


def save_llava_with_experts(folder: Path, **more: Any) -> Path:
    """A LLaVA whose decoder has 4 experts in each layer, of which a token visits 2 (Qwen3-MoE)."""
    return save_llava(folder, Qwen3MoeConfig, **{"head_dim": 8, "norm_topk_prob": True} | EXPERTS | more)


def _save(kind: type, config: Any, folder: Path, sharpness: float = 1.0) -> Path:
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():  # biases and norms start at 0 and 1, where some mistakes do not show
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
        for name, parameter in model.named_parameters():
            parameter *= sharpness if "q_proj" in name or "k_proj" in name else 1.0
    model.save_pretrained(folder)
    return folder
