"""Tiny configurations of declared families, without importing any library."""

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


# Name of the case → model_type, arguments of its configuration.
FAMILIES: dict[str, tuple[str, Parts]] = {
    "qwen2_vl": ("qwen2_vl", {"text_config": text("qwen2_vl_text", **THREE), "vision_config": QWEN2_TOWER, **QWEN}),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {
            "text_config": text("qwen2_5_vl_text", **THREE),
            "vision_config": grid(window_size=16, fullatt_block_indexes=[1]),
            **QWEN,
        },
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {"text_config": text("qwen3_vl_text", **THREE), "vision_config": grid(**DEEPSTACK), **QWEN},
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {"text_config": text("qwen3_vl_moe_text", **THREE, **EXPERTS), "vision_config": grid(**DEEPSTACK), **QWEN},
    ),
    "qwen3_5": (
        "qwen3_5",
        {"text_config": text("qwen3_5_text", **GATED), "vision_config": grid(num_position_embeddings=64), **QWEN},
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {
            "text_config": text("qwen3_5_moe_text", **GATED, **EXPERTS, shared_expert_intermediate_size=16),
            "vision_config": grid(num_position_embeddings=64),
            **QWEN,
        },
    ),
    "internvl": (
        "internvl",
        {
            "text_config": text("qwen2"),
            "vision_config": square({}, image_size=[SIDE, SIDE], patch_size=[7, 7]),
            "image_token_id": IMAGE,
            "image_seq_length": 4,
            "tie_word_embeddings": False,
        },
    ),
    "glm4v": ("glm4v", {"text_config": text("glm4v_text", **GLM_TEXT), "vision_config": GLM_TOWER, **GLM}),
    "glm46v": (
        "glm46v",
        {
            "text_config": text("glm4v_text", **GLM_TEXT),
            "vision_config": {"model_type": "glm4v_vision", **GLM_TOWER},
            **GLM,
        },
    ),
    "glm4v_moe": (
        "glm4v_moe",
        {
            "text_config": text(
                "glm4v_moe_text", **GLM_TEXT, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
            ),
            "vision_config": GLM_TOWER,
            **GLM,
        },
    ),
    "llava_clip": ("llava", {"text_config": text("llama"), "vision_config": square(CLIP), "image_token_id": IMAGE}),
    "llava_siglip": (
        "llava",
        {"text_config": text("qwen3"), "vision_config": square(SIGLIP), "image_token_id": IMAGE, **WHOLE},
    ),
    "llava_pixtral": (
        "llava",
        {
            "text_config": text("mistral", sliding_window=None),
            "vision_config": pixtral(),
            "image_token_id": IMAGE,
            **WHOLE,
        },
    ),
    "llava_next": (
        "llava_next",
        {
            "text_config": text("mistral", sliding_window=None),
            "vision_config": square(CLIP),
            "image_token_id": IMAGE,
            "image_grid_pinpoints": PINPOINTS,
        },
    ),
    "llava_onevision": (
        "llava_onevision",
        {
            "text_config": text("qwen2"),
            "vision_config": square(SIGLIP),
            **PLACES,
            "image_grid_pinpoints": PINPOINTS,
            **WHOLE,
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "text_config": text("gemma3_text", query_pre_attn_scalar=8, sliding_window=6, layer_types=SLIDING),
            "vision_config": square(SIGLIP),
            "image_token_index": IMAGE,
            "image_token_id": IMAGE,
            "boi_token_index": BEGIN,
            "eoi_token_index": END,
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma4": (
        "gemma4",
        {
            "text_config": text(
                "gemma4_text",
                **GEMMA4_TEXT,
                hidden_size_per_layer_input=8,
                vocab_size_per_layer_input=VOCABULARY,
                num_kv_shared_layers=2,
                use_bidirectional_attention=None,
            ),
            **GEMMA4,
        },
    ),
    "gemma4_moe": (
        "gemma4",
        {
            "text_config": text(
                "gemma4_text",
                **GEMMA4_TEXT,
                hidden_size_per_layer_input=0,
                num_kv_shared_layers=0,
                use_bidirectional_attention="vision",
                enable_moe_block=True,
                num_experts=4,
                top_k_experts=2,
                moe_intermediate_size=16,
            ),
            **GEMMA4,
        },
    ),
    "paligemma2": (
        "paligemma",
        {
            "text_config": text("gemma2", sliding_window=6, query_pre_attn_scalar=8, layer_types=SLIDING),
            "vision_config": square(SIGLIP, projection_dim=32),
            "image_token_index": IMAGE,
            "image_token_id": IMAGE,
            "projection_dim": 32,
            "hidden_size": 32,
        },
    ),
    "idefics3": (
        "idefics3",
        {"text_config": text("llama"), "vision_config": square({}), "image_token_id": IMAGE, "scale_factor": 2},
    ),
    "smolvlm": (
        "smolvlm",
        {"text_config": text("llama"), "vision_config": square({}), "image_token_id": IMAGE, "scale_factor": 2},
    ),
    "mistral3": (
        "mistral3",
        {
            "text_config": text("mistral", sliding_window=None),
            "vision_config": pixtral(),
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
            "tie_word_embeddings": False,
        },
    ),
    "kimi_k25": (
        "kimi_k25",
        {
            "text_config": text("deepseek_v3", **DEEPSEEK),
            "vision_config": {**square({}, patch_size=4), "pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 4},
            "projection_hidden_size": 24,
            **QWEN,
            "tie_word_embeddings": False,
        },
    ),
    "aya_vision": (
        "aya_vision",
        {
            "text_config": text("cohere2", sliding_window=6, layer_types=SLIDING),
            "vision_config": square(SIGLIP),
            "image_token_index": IMAGE,
            "image_token_id": IMAGE,
            "downsample_factor": 2,
            **WHOLE,
        },
    ),
    "cohere2_vision": (
        "cohere2_vision",
        {
            "text_config": text("cohere2", sliding_window=6, layer_types=SLIDING),
            "vision_config": square(SIGLIP),
            "image_token_id": IMAGE,
            "downsample_factor": 2,
            "alignment_intermediate_size": 32,
        },
    ),
    "ovis2": (
        "ovis2",
        {
            "text_config": text("qwen2"),
            "vision_config": square({}, vocab_size=40, hidden_stride=2, num_visual_indicator_tokens=5),
            "image_token_id": IMAGE,
            "visual_indicator_token_ids": [305, 306, 307, 308, 309],
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "tie_word_embeddings": False,
        },
    ),
    "ernie4_5_vl_moe": (
        "ernie4_5_vl_moe",
        {
            "text_config": text(
                "ernie4_5_vl_moe_text",
                **THREE,
                moe_num_experts=4,
                moe_k=2,
                moe_intermediate_size=[16, 16],
                mlp_layer_types=["dense", "sparse", "sparse"],
                moe_num_shared_experts=1,
            ),
            "vision_config": grid(depth=2),
            **PLACES,
            "image_start_token_id": BEGIN,
            "image_end_token_id": END,
            "video_start_token_id": 305,
            "video_end_token_id": 306,
        },
    ),
    "minicpmv4_6": (
        "minicpmv4_6",
        {
            "text_config": text("qwen3_5_text", **GATED),
            "vision_config": square({}, image_size=32, patch_size=4, insert_layer_id=1),
            "insert_layer_id": 1,
            **PLACES,
            "image_size": 32,
        },
    ),
    "qwen3_omni": (
        "qwen3_omni_moe_thinker",
        {
            "text_config": text("qwen3_omni_moe_text", **THREE, **EXPERTS),
            "vision_config": grid(**DEEPSTACK, image_size=None),
            "audio_config": {
                "d_model": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 16,
                "output_dim": 32,
                "downsample_hidden_size": 8,
                "num_mel_bins": 16,
                "n_window_infer": 200,  # two chunks, so that a clip has several windows
            },
            **QWEN,
            "audio_token_id": 305,
            "audio_start_token_id": 306,
            "audio_end_token_id": 307,
        },
    ),
}
