"""The tests' tiny models made wide enough that a step is work: the same structures, layers and heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedConfig

from tests.helpers.tiny_families import FAMILIES, VOCABULARY

WIDER = 8  # times as wide as in the tests
WORDS = 4096  # rows of the vocabulary
PATCH = 14  # pixels along a side
SIDE = 16  # patches along a side of a picture where all have one size
CELLS = 4  # times as many patches along a side of a picture of any size as the doctor's have

# Numbers of a configuration that are widths, by their factor.
_TIMES = {
    **dict.fromkeys(
        ("hidden_size", "head_dim", "global_head_dim", "embed_dim", "out_hidden_size", "projection_dim",
         "query_pre_attn_scalar", "hidden_size_per_layer_input", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim",
         "qk_nope_head_dim", "v_head_dim", "linear_key_head_dim", "linear_value_head_dim", "projection_hidden_size",
         "moe_intermediate_size", "shared_expert_intermediate_size", "mrope_section", "d_model", "output_dim",
         "downsample_hidden_size"),
        WIDER,
    ),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "alignment_intermediate_size"), 2 * WIDER),
    "sliding_window": 2 * WIDER,
    "max_position_embeddings": WIDER,
}  # fmt: skip
_PIXELS = ("image_size", "patch_size", "window_size", "image_grid_pinpoints")


def make_config(name: str) -> PreTrainedConfig:
    """Of a case of `tests.helpers.tiny_families`, widened."""
    model_type, arguments = FAMILIES[name]
    return CONFIG_MAPPING[model_type](**_wide(arguments, _patch(arguments["vision_config"])))


def save_model(name: str, folder: Path) -> str:
    """A model of the case with random weights, as an ordinary directory."""
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(make_config(name)).save_pretrained(folder)
    return str(folder)


def grow(picture: dict[str, Any], seed: int) -> dict[str, Any]:
    """A picture of the doctor's with `CELLS` times as many patches along each side, where its family's may have any
    number; else as it is. The arguments of one picture are those of `dhp.models.contract.random_pictures`."""
    random = torch.Generator().manual_seed(seed)
    pixels = picture["pixel_values"]
    drawn = lambda *shape: torch.randn(*shape, dtype=pixels.dtype, generator=random)
    for name in ("image_grid_thw", "image_grid_hw"):
        if name in picture:
            grid = picture[name].clone()
            grid[:, -2:] *= CELLS
            return picture | {"pixel_values": drawn(len(pixels) * CELLS**2, *pixels.shape[1:]), name: grid}
    if "target_sizes" in picture:
        shape = (*pixels.shape[:-1], pixels.shape[-1] * CELLS**2)
        return picture | {"pixel_values": drawn(*shape), "target_sizes": picture["target_sizes"] * CELLS}
    if "image_position_ids" in picture:
        return _positioned(picture, drawn)
    if "image_sizes" in picture and pixels.ndim == 4:
        shape = (*pixels.shape[:2], *(CELLS * side for side in pixels.shape[2:]))
        return picture | {"pixel_values": drawn(*shape), "image_sizes": picture["image_sizes"] * CELLS}
    return picture


def _positioned(picture: dict[str, Any], drawn: Any) -> dict[str, Tensor]:
    """Patches in rows of one length, with their places; -1 where there is none."""
    places = picture["image_position_ids"][0]
    columns, rows = ((places.max(0).values + 1) * CELLS).tolist()
    most = len(places) * CELLS**2
    pixels = torch.zeros(1, most, picture["pixel_values"].shape[-1], dtype=picture["pixel_values"].dtype)
    pixels[:, : rows * columns] = drawn(1, rows * columns, pixels.shape[-1]).sigmoid()
    wide = torch.full((1, most, 2), -1)
    down, along = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    wide[0, : rows * columns] = torch.stack([along.flatten(), down.flatten()], dim=-1)
    return {"pixel_values": pixels, "image_position_ids": wide}


def _patch(vision: dict[str, Any]) -> int:
    size = vision["patch_size"]
    return size[0] if isinstance(size, list) else size


def _wide(value: Any, patch: int, key: str = "") -> Any:
    """A part of a configuration, widened. patch: the tiny model's patches, pixels along a side."""
    if isinstance(value, dict):
        return {name: _wide(inner, patch, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_wide(inner, patch, key) for inner in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if key in _PIXELS:
        # What is a picture's side in the tests has 4 or 8 patches.
        return value * PATCH // patch * (1 if key in ("patch_size", "window_size") else SIDE // 4)
    if key in ("vocab_size", "vocab_size_per_layer_input") and value == VOCABULARY:
        return WORDS
    if key in ("mm_tokens_per_image", "image_seq_length"):
        return value * (SIDE // 4) ** 2
    if key in ("num_position_embeddings", "pos_emb_height", "pos_emb_width"):
        return value * SIDE
    return value * _TIMES.get(key, 1)
