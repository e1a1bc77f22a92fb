"""A tiny configuration of each declared family. Importing this brings no library along: completion lists them."""

from __future__ import annotations

from dhp.tiny.sections import (
    BEGIN,
    CLIP,
    DEEPSEEK,
    DEEPSTACK,
    END,
    EXPERTS,
    GATED,
    GEMMA4,
    GEMMA4_TEXT,
    GLM,
    GLM_TEXT,
    GLM_TOWER,
    IMAGE,
    PINPOINTS,
    PLACES,
    QWEN,
    QWEN2_TOWER,
    SIDE,
    SIGLIP,
    SLIDING,
    THREE,
    VOCABULARY,
    WHOLE,
    Parts,
    grid,
    pixtral,
    square,
    text,
)

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
