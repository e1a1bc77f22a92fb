"""Tiny configurations of families that no test declares, whose decoders have layers of several kinds."""

from typing import Any

from dhp.tiny.tiny_families import (
    BEGIN,
    DEEPSEEK,
    EXPERTS,
    FAMILIES,
    GATED,
    GLM,
    IMAGE,
    PLACES,
    QWEN,
    SLIDING,
    VOCABULARY,
    grid,
    pixtral,
    rope,
    square,
    text,
)

Parts = dict[str, Any]
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
MUSE_TOWER = {
    **square({}, patch_size=4, num_hidden_layers=2),
    **{"pos_emb_height": 8, "pos_emb_width": 8, "patch_temporal": 2, "merge_size": 2, "max_position_embeddings": 64},
    "layer_types": ["window_attention", "full_attention"],
}
MUSE = {**PLACES, "out_hidden_size": 96, "projector_hidden_size": 48}
MUSE_TEXT = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "layer_rope_theta": [1e4, 0, 1e4, 0],
}
SAM = {
    **{"hidden_size": 24, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 32},
    **{"image_size": 64, "patch_size": 4, "window_size": 4, "global_attn_indexes": [1]},
}
# Many heads: scores of zero are alike, and which of these are chosen says a sort.
INDEXED = {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 16}
AUDIO_TOKENS = {"audio_token_id": 305}
KDA = {
    **{"linear_head_dim": 8, "linear_num_heads": 4, "linear_conv_kernel_dim": 4, "hc_mult": 2, "index_kpool": 4},
    **{"layer_types": ["linear_attention", "indexed_attention"] * 2, "num_hidden_layers": 4},
    **{"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "indexer_types": ["full"] * 4},
}
QSA = {
    f"indexer_{name}": n
    for name, n in zip(("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio"), (2, 1, 16, 8, 2))
}
MLA = {**DEEPSEEK, **INDEXED}
INKLING = {
    **{"num_hidden_layers": 4, "layer_types": ["hybrid_sliding", "hybrid"] * 2, "conv_kernel_size": 4},
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 6},
    **{"d_rel": 4, "rel_extent": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
INKLING_TOWER = {
    **square({}, patch_size=4),
    **{"spatial_merge_size": 2, "posemb_grid_size": 8, "projection_hidden_dim": 32, "text_hidden_size": 32},
}

# Name of the case → model_type, arguments of its configuration.
HYBRID: dict[str, tuple[str, Parts]] = {
    "muse_glimmer": (
        "muse_glimmer",
        {"text_config": text("muse_glimmer_text", **MUSE_TEXT), "vision_config": MUSE_TOWER, **MUSE},
    ),
    "muse_spark": (
        "muse_spark",
        {
            "text_config": text(
                "muse_spark_text",
                **MUSE_TEXT,
                **{"moe_intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
                moe_hidden_size=16,
                mlp_layer_types=["sparse"] * 4,
            ),
            "vision_config": MUSE_TOWER,
            "audio_config": {"patch_sizes": [16, 6, 5, 4], "hidden_sizes": [4, 8, 8, 16], "depths": [1, 1, 1, 1]}
            | {"out_hidden_size": 32},
            **MUSE,
            **AUDIO_TOKENS,
        },
    ),
    "step3p7": (
        "step3p7",
        {
            "text_config": text(
                "step3p5",
                **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
                share_expert_dim=16,
                sliding_window=6,
                num_sliding_attention_heads=4,
                layer_types=SLIDING,
                mlp_layer_types=["dense", "sparse", "sparse"],
                rope_parameters={kind: PLAIN["rope_parameters"] for kind in ("full_attention", "sliding_attention")},
                per_layer_config={},
            ),
            "vision_config": square({}, image_size=32, patch_size=4, max_position_embeddings=64),
            "image_token_id": IMAGE,
        },
    ),
    "glm5_next": (
        "glm5_next",
        {
            "text_config": text("glm5_next_text", **(MLA | {"qk_rope_head_dim": 0, "head_dim": 0} | KDA)),
            "vision_config": grid(image_size=32, projection_intermediate_size=32),
            **GLM,
            "video_end_token_id": 306,
        },
    ),
    "dots3_note": (
        "dots3_note",
        {
            "text_config": text(
                "dots3_note_text",
                **MLA,
                num_hidden_layers=3,
                layer_types=["indexed_attention", "sliding_attention", "indexed_attention"],
                mlp_layer_types=["dense", "sparse", "sparse"],
                sliding_window=6,
                shared_experts_intermediate_size=16,
                **{
                    f"swa_{name}": MLA[name]
                    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
                },
                **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 12},
            ),
            "vision_config": {
                **square({}, patch_size=4),
                **{"moe_intermediate_size": 16, "spatial_merge_size": 2, "num_local_experts": 4},
                **{"mlp_layer_types": ["dense", "dense", "sparse"], "per_layer_config": {}},
                **{"adapter_in_dim": 24, "adapter_out_dim": 32, "adapter_merge_size": 2},
            },
            "audio_config": {
                **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
                **{"num_key_value_heads": 2, "head_dim": 8, "downsample_hidden_size": 8, "adapter_input_size": 16},
                **{"adapter_out_dim": 32, "feature_size": 16},
            },
            **PLACES,
            **AUDIO_TOKENS,
        },
    ),
    "mistral_large4": (
        "mistral_large4",
        {
            "text_config": text(
                "mistral_large4_text",
                **{name: value for name, value in MLA.items() if name != "q_lora_rank"},
                **PLAIN,
                layer_types=["indexed_attention"] * 3,
                mlp_layer_types=["dense", "sparse", "sparse"],
                indexer_types=["full", "shared", "full"],
                no_rope_layers=[1, 1, 0],
                kv_source_layers=[0, 1, 2],
            ),
            "vision_config": pixtral(),
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
        },
    ),
    "qwen4_exp": (
        "qwen4_exp",
        {
            "text_config": text(
                "qwen4_exp_text",
                **{**GATED, **EXPERTS, **QSA, "layer_types": ["linear_attention", "indexed_attention"] * 2},
                shared_expert_intermediate_size=16,
                hc_count=2,
                hc_lowrank=8,
            ),
            "vision_config": grid(num_position_embeddings=64),
            **QWEN,
        },
    ),
    "inkling2": (
        "inkling2",
        {
            "text_config": text(
                "inkling2_text", **INKLING, unpadded_vocab_size=VOCABULARY, n_layers_per_attn_res_block=2
            ),
            "vision_config": INKLING_TOWER,
            "image_token_id": IMAGE,
        },
    ),
    "inkling2_loop": (
        "inkling2_loop",
        {
            "text_config": text(
                "inkling2_loop_text",
                **{name: value for name, value in INKLING.items() if name not in ("num_hidden_layers", "layer_types")},
                **{"num_hidden_layers": 6, "layer_types": ["hybrid_sliding", "hybrid"] * 3},
                **{"loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 3, "loop_gate_rank": 4},
                unpadded_vocab_size=VOCABULARY,
                n_layers_per_attn_res_block=2,
            ),
            "vision_config": INKLING_TOWER,
            "image_token_id": IMAGE,
        },
    ),
    "hy_v4_vl": (
        "hy_v4_vl",
        {
            "text_config": text(
                "hy_v4_vl_text",
                **MLA,
                **rope(1, 1, 0),
                mlp_layer_types=["dense", "sparse", "sparse"],
                indexer_types=["full", "full", "shared"],
                hc_mult=2,
            ),
            "vision_config": {
                **square({}, patch_size=4, max_image_size=32),
                **{"spatial_merge_size": 2, "out_hidden_size": 32},
            },
            **PLACES,
        },
    ),
    "inkling_mm_model": (
        "inkling_mm_model",
        {
            "text_config": text(
                "inkling_text", **INKLING, mlp_layer_types=["dense", *["sparse"] * 3], n_shared_experts=1
            ),
            "vision_config": {
                **{"text_hidden_size": 32, "patch_size": 8, "hidden_size": 24, "n_layers": 2, "num_attention_heads": 2}
            },
            "audio_config": {"n_mel_bins": 8, "mel_vocab_size": 16, "text_hidden_size": 32},
            "image_token_id": IMAGE,
            **AUDIO_TOKENS,
            "image_bos_token_id": BEGIN,
            "audio_bos_token_id": 306,
        },
    ),
    "nemotron_h_omni": (
        "nemotron_h_omni",
        {
            "text_config": text(
                "nemotron_h",
                layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
                num_hidden_layers=4,
                **{"ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8},
                **{"n_routed_experts": 4, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16},
            ),
            "vision_config": {
                **square({"model_type": "radio"}, patch_size=4, image_size=32),
                **{"max_img_size": 64, "num_cls_tokens": 1, "num_registers": 1, "summary_idxs": [0]},
                "video_temporal_patch_size": 2,
            },
            "vision_hidden_size": 24,
            "projector_hidden_size": 32,
            "image_token_id": IMAGE,
        },
    ),
    "minicpmv4_7": ("minicpmv4_7", FAMILIES["minicpmv4_6"][1]),
    "minicpm_ocr": ("minicpm_ocr", FAMILIES["minicpmv4_6"][1]),
    "unlimited_ocr": (
        "unlimited_ocr",
        {
            "text_config": text(
                "unlimited_ocr_text",
                **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16},
                mlp_layer_types=["dense", "sparse", "sparse"],
                layer_types=["reference_sliding_attention"] * 3,
                sliding_window=6,
            ),
            "vision_config": {
                "sam_config": {**SAM, "downsample_channels": [16, 24]},
                "encoder_config": square({}, image_size=64, patch_size=16),
            },
            "image_token_id": IMAGE,
        },
    ),
}
