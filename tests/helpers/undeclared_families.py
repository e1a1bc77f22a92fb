"""Tiny configurations of families that run by the contract alone, or of which it is known why they do not."""

from typing import Any

from dhp.tiny.tiny_families import (
    BEGIN,
    CLIP,
    DEEPSTACK,
    END,
    FAMILIES,
    IMAGE,
    PINPOINTS,
    PLACES,
    QWEN,
    SIDE,
    SIGLIP,
    SLIDING,
    THREE,
    VIDEO,
    VOCABULARY,
    grid,
    rope,
    square,
    text,
)
from tests.helpers.hybrid_families import HYBRID

Parts = dict[str, Any]
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
SAM = {
    **{"hidden_size": 24, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 32},
    **{"image_size": 64, "patch_size": 4, "window_size": 4, "global_attn_indexes": [1]},
}
QFORMER = {
    **{"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    **{"encoder_hidden_size": 24, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
OPT = {
    **{"model_type": "opt", "vocab_size": VOCABULARY, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "dropout": 0.0, "max_position_embeddings": 512},
}
AUDIO_TOKENS = {"audio_token_id": 305}

QUERIES = {
    "text_config": OPT,
    "vision_config": square({}),
    "qformer_config": QFORMER,
    "num_query_tokens": 4,
    "image_token_index": IMAGE,
}
OCR = {"text_config": text("qwen2"), "vision_config": SAM, "image_token_index": IMAGE, "image_seq_length": 16}

# Name of the case → model_type, arguments of its configuration.
UNDECLARED: dict[str, tuple[str, Parts]] = {
    "aria": (
        "aria",
        {
            "text_config": text(
                "aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1, intermediate_size=16
            ),
            "vision_config": square({"model_type": "idefics3_vision"}),
            "projector_patch_to_query_dict": {16: 4},
            "image_token_index": IMAGE,
        },
    ),
    "blip-2": ("blip-2", QUERIES),
    "instructblip": ("instructblip", QUERIES),
    "instructblipvideo": ("instructblipvideo", QUERIES | {"video_token_index": IMAGE}),
    "chameleon": (
        "chameleon",
        {
            **{name: value for name, value in text("").items() if name != "model_type"},
            "vocabulary_map": {"<image>": IMAGE, **{f"IMGIMG{'ABCDEFGH'[n]}Z": 280 + n for n in range(8)}},
            "vq_config": {
                **{"embed_dim": 8, "num_embeddings": 8, "latent_channels": 8, "resolution": 16, "base_channels": 32},
                **{"channel_multiplier": [1, 1], "num_res_blocks": 1},
            },
        },
    ),
    "emu3": (
        "emu3",
        {
            "text_config": text("emu3_text_model", attention_dropout=0.0),
            "vq_config": {
                **{"codebook_size": 8, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "hidden_size": 32},
                **{"channel_multiplier": [1, 1], "num_res_blocks": 1},
            },
            "vocabulary_map": {"<image>": IMAGE, **{f"<|visual token {n:06d}|>": 280 + n for n in range(8)}},
        },
    ),
    "apertus1p5": (
        "apertus1p5",
        {
            "text_config": text("apertus1p5_text"),
            "vision_config": {
                **{"codebook_size": 8, "embed_dim": 8, "latent_channels": 8, "base_channels": 32, "resolution": 16},
                **{"channel_multiplier": [1, 1], "num_res_blocks": 1},
            },
            "audio_config": {
                **{"num_filters": 4, "upsampling_ratios": [4, 2], "num_lstm_layers": 1, "hidden_size": 16},
                **{"codebook_size": 8, "codebook_dim": 16},
            },
            "image_token_id": IMAGE,
            **AUDIO_TOKENS,
            "image_token_offset": 280,
            "audio_token_offset": 288,
        },
    ),
    "fuyu": ("fuyu", {"text_config": text("persimmon"), "patch_size": 4, "image_size": 16, "image_token_id": IMAGE}),
    "gemma4_unified": (
        "gemma4_unified",
        {
            "text_config": text(
                "gemma4_unified_text",
                num_hidden_layers=4,
                layer_types=["sliding_attention", "full_attention"] * 2,
                sliding_window=6,
                per_layer_config={},
                final_logit_softcapping=30.0,
            ),
            "vision_config": {
                **{
                    "patch_size": 4,
                    "pooling_kernel_size": 2,
                    "model_patch_size": 8,
                    "mm_embed_dim": 24,
                    "mm_posemb_size": 64,
                },
                **{"output_proj_dims": 24},
            },
            **PLACES,
            "boi_token_id": BEGIN,
            "eoi_token_id": END,
            **AUDIO_TOKENS,
        },
    ),
    "diffusion_gemma": (
        "diffusion_gemma",
        {
            "text_config": text(
                "diffusion_gemma_text",
                num_hidden_layers=4,
                layer_types=["sliding_attention", "full_attention"] * 2,
                sliding_window=6,
                per_layer_config={},
                **{"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
            ),
            "vision_config": {
                **square({}, num_hidden_layers=2, num_key_value_heads=2, head_dim=12, patch_size=4),
                "position_embedding_size": 64,
            },
            "image_token_id": IMAGE,
            "canvas_length": 8,
        },
    ),
    "glmga": ("glmga", FAMILIES["glm46v"][1]),
    "got_ocr2": ("got_ocr2", OCR),
    "pp_chart2table": ("pp_chart2table", OCR),
    "granite4_vision": (
        "granite4_vision",
        {
            "text_config": text("granite4_vision_text"),
            "vision_config": square(CLIP, hidden_size=64),
            "qformer_config": QFORMER | {"hidden_size": 64, "encoder_hidden_size": 64, "num_attention_heads": 1},
            "image_token_index": IMAGE,
            "image_grid_pinpoints": PINPOINTS,
            "projector_dropout": 0.0,
            "downsample_rate": "2/4",
            "deepstack_layer_map": [[-2, 0], [-1, 1]],
            "spatial_target_layers": [1, 2],
            "use_image_newline_parameter": True,
        },
    ),
    "granite_docling": (
        "granite_docling",
        {
            "text_config": text("granite_docling_text", logits_scaling=4.0),
            "vision_config": {
                **square({}, image_size=32, patch_size=4),
                **{"out_hidden_size": 32, "scale_factor": 2, "deepstack_visual_indexes": [0, 1]},
            },
            "image_token_id": IMAGE,
        },
    ),
    "hunyuan_vl": (
        "hunyuan_vl",
        {
            "text_config": text("hunyuan_vl_text", **rope(1, 1, 1, 1)),
            "vision_config": {
                **square({}, patch_size=4, image_size=32),
                **{"num_key_value_heads": 2, "out_hidden_size": 32, "text_hidden_size": 32, "max_image_size": 64},
            },
            "image_token_id": IMAGE,
            "im_start_id": BEGIN,
            "im_end_id": END,
            "im_newline_id": 305,
        },
    ),
    "janus": (
        "janus",
        {
            "text_config": text("llama"),
            "vision_config": {**square({}), "projection_dim": 32, "num_image_tokens": 16, "depth": 2},
            "vq_config": {
                **{"embed_dim": 8, "num_embeddings": 16, "latent_channels": 8, "base_channels": 32},
                **{"channel_multiplier": [1, 1], "num_res_blocks": 1, "num_patches": 4, "projection_dim": 32},
                "image_token_embed_dim": 32,
            },
            "image_token_id": IMAGE,
        },
    ),
    "llama4": (
        "llama4",
        {
            "text_config": text(
                "llama4_text",
                intermediate_size_mlp=48,
                num_local_experts=4,
                num_hidden_layers=4,
                attention_chunk_size=8,
                attn_temperature_tuning=False,
                **PLAIN,
            ),
            "vision_config": {
                **square({"model_type": "llama4_vision_model"}, intermediate_size=96),
                **{"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
            },
            "image_token_index": IMAGE,
            "boi_token_index": BEGIN,
            "eoi_token_index": END,
        },
    ),
    "molmo2": (
        "molmo2",
        {
            "text_config": text("molmo2_text", additional_vocab_size=16),
            "vision_config": {
                **square({}, image_size=[SIDE, SIDE], num_key_value_heads=2, head_dim=12),
                "num_position_embeddings": 16,
            },
            "adapter_config": {
                **{"vision_feature_layer": [-1, -2], "hidden_size": 24, "num_attention_heads": 2, "head_dim": 12},
                **{"num_key_value_heads": 2, "intermediate_size": 32, "text_hidden_size": 32},
            },
            "image_start_token_id": BEGIN,
            "image_end_token_id": END,
            "image_patch_id": IMAGE,
            "low_res_image_start_token_id": 305,
            "frame_start_token_id": 306,
            "frame_end_token_id": 307,
        },
    ),
    "qianfan_ocr": (
        "qianfan_ocr",
        {
            "text_config": text("qwen3"),
            "vision_config": square({}, image_size=[SIDE, SIDE], patch_size=[7, 7], drop_path_rate=0.0),
            "image_token_id": IMAGE,
            "image_seq_length": 4,
        },
    ),
    "qwen2_5_omni_thinker": (
        "qwen2_5_omni_thinker",
        {
            "text_config": text("qwen2_5_omni_text", **THREE),
            "vision_config": grid(window_size=16, fullatt_block_indexes=[1]),
            "audio_config": {
                **{"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16},
                **{"output_dim": 32, "num_mel_bins": 16},
            },
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "audio_token_index": 305,
            **{"vision_start_token_id": BEGIN, "vision_end_token_id": END},
            "audio_start_token_id": 306,
            "audio_end_token_id": 307,
        },
    ),
    "shieldgemma2": ("shieldgemma2", FAMILIES["gemma3"][1]),
    "cohere_compass": (
        "cohere_compass",
        {
            "text_config": text(
                "cohere_compass_text",
                layer_types=SLIDING,
                sliding_window=6,
                rope_parameters={
                    kind: rope(1, 1, 2)["rope_parameters"] for kind in ("full_attention", "sliding_attention")
                },
            ),
            "vision_config": grid(**DEEPSTACK),
            **QWEN,
        },
    ),
    "deepseek_ocr2": (
        "deepseek_ocr2",
        {
            "text_config": text(
                "deepseek_ocr2_text",
                **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16},
                mlp_layer_types=["dense", "sparse", "sparse"],
                n_group=1,
                topk_group=1,
            ),
            "vision_config": {
                "sam_config": {**SAM, "downsample_channels": [16, 24], "scale": 8},
                "encoder_config": {**text("deepseek_ocr2_encoder"), "hidden_size": 24},
            },
            "image_token_id": IMAGE,
        },
    ),
    "video_llava": (
        "video_llava",
        {
            "text_config": text("llama"),
            "vision_config": square(CLIP),
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "image_seq_length": 16,
        },
    ),
    "deepseek_vl_hybrid": (
        "deepseek_vl_hybrid",
        {
            "text_config": text("llama"),
            "vision_config": square(SIGLIP),
            "high_res_vision_config": {"model_type": "sam_vision_model", **SAM},
            "image_token_id": IMAGE,
        },
    ),
    **HYBRID,
}
