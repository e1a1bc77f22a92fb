"""Tiny models of a few families, and samples for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig

from dhp.data.sample.sample import Sample
from dhp.doctor.trial import SampleMaker
from dhp.models.contract.twin_model import ProbeModel
from dhp.models.registry import load_family
from experiments.gpu_check.setting import Setting

LAYERS = 2
TEXT = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
TOWER = {
    "depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 14, "out_hidden_size": 64,
}  # fmt: skip
TOKENS = {"image_token_id": 505, "video_token_id": 506, "vision_start_token_id": 503, "vision_end_token_id": 504}
DEEP = TOWER | {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]}
WHOLE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def _turned(sections: list[int]) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}}


EXPERTS: dict[str, Any] = {
    "text_config": TEXT
    | _turned([2, 1, 1])
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": []},
    "vision_config": DEEP,
    **TOKENS,
}
# By model type, and what is said behind it.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": TEXT | _turned([1, 1, 2]),
        "vision_config": TOWER | {"window_size": 56, "fullatt_block_indexes": [1, 3]},
        **TOKENS,
    },
    "qwen3_vl": {"text_config": TEXT | _turned([2, 1, 1]), "vision_config": DEEP, **TOKENS},
    "qwen3_vl_moe": EXPERTS,
    # Each token visits each expert: which two it visits is decided by rounding where they are nearly as good.
    "qwen3_vl_moe, all experts": EXPERTS | {"text_config": EXPERTS["text_config"] | {"num_experts_per_tok": 4}},
    # By the generic contract, with windows in its decoder.
    "gemma3": {
        "text_config": TEXT
        | {
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": WHOLE | {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
        "image_token_index": 505,
        "image_token_id": 505,
        "boi_token_index": 503,
        "eoi_token_index": 504,
        "mm_tokens_per_image": 4,
    },
}


@dataclass(frozen=True)
class Tiny:
    """folder: of the model, in float32. steps: the samples of each."""

    folder: str
    steps: tuple[Sequence[Sample], ...]


@cache
def make_tiny(setting: Setting, family: str) -> Tiny:
    """The same each time; its files are written once for all processes."""
    twin = ProbeModel(AutoConfig.for_model(family.partition(",")[0], tie_word_embeddings=False, **FAMILIES[family]))
    folder = setting.folder / family
    if not folder.exists():
        partial = setting.folder / f"{family}_unfinished"
        twin.model.to(torch.float32).save_pretrained(partial)
        twin.model.to(torch.float64)
        partial.rename(folder)
    maker = SampleMaker(twin, load_family(str(folder)))
    first = [maker.sample([0], 4, 1), maker.sample([], 3, 2), maker.sample([1, 2], 5, 3), maker.sample([1], 6, 4)]
    second = [maker.sample([], 9, 5), maker.sample([2], 2, 6), maker.sample([], 4, 7), maker.sample([0, 1], 7, 8)]
    return Tiny(str(folder), (first, second))
