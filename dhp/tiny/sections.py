"""Sections of tiny configurations, as the families share them."""

from __future__ import annotations

from typing import Any

IMAGE, VIDEO, BEGIN, END = 301, 302, 303, 304
VOCABULARY = 320
SIDE = 28  # pixels of a picture of one size, in patches of 7
PLACES = {"image_token_id": IMAGE, "video_token_id": VIDEO}
QWEN = {**PLACES, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
GLM = {**PLACES, "image_start_token_id": BEGIN, "image_end_token_id": END, "video_start_token_id": 305}
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False}
CLIP = {"model_type": "clip_vision_model", "projection_dim": 16}
PINPOINTS = [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def text(model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def rope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}}


def square(kind: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A tower of pictures of one size."""
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    return {**kind, **sizes, "image_size": SIDE, "patch_size": 7, **more}


def grid(**more: Any) -> dict[str, Any]:
    """A tower of pictures of any size."""
    sizes = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
    return {**sizes, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, **more}


def pixtral() -> dict[str, Any]:
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    return {"model_type": "pixtral", **sizes, "head_dim": 12, "image_size": 32, "patch_size": 4}


Parts = dict[str, Any]
THREE, HALF = rope(1, 1, 2), {"partial_rotary_factor": 0.5}
GATED = {**rope(1, 1, 2, **HALF), **LINEAR}
WHOLE = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
DEEPSTACK = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
GLM_TEXT, GLM_TOWER = rope(1, 1, 0, **HALF), grid(image_size=32)
QWEN2_TOWER = {k: v for k, v in grid(embed_dim=32, mlp_ratio=2).items() if not k.startswith(("out_", "inter"))}
DEEPSEEK = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "head_dim": 4,
}
GEMMA4_TEXT = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "global_head_dim": 8,
    "final_logit_softcapping": 30.0,
}
GEMMA4 = {
    "vision_config": {
        **square({}, num_hidden_layers=2, num_key_value_heads=2, head_dim=12),
        "patch_size": 4,
        "pooling_kernel_size": 3,
        "position_embedding_size": 1024,  # of columns or rows: the most that a narrow picture has
    },
    "audio_config": None,
    **PLACES,
    "boi_token_id": BEGIN,
    "eoi_token_id": END,
    "audio_token_id": 305,
}
