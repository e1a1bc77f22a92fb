"""Tokens and processors of tiny models, by family."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dhp.tiny.tiny_families import PINPOINTS, SIDE

ONE_SIZE = {"height": SIDE, "width": SIDE}
FEWEST, MOST = 32 * 32, 64 * 64  # pixels of a picture of any size


@dataclass(frozen=True)
class Look:
    """image: in a prompt. ids: tokens by the configuration's keys. pictures: the image processor's class, its
    arguments. processor: the processor's arguments; None: the family is read without one, and none is written.

    video: in a prompt.

    named: tokens that the tokenizer knows by a name. more: further tokens of the processor's. needs: a package without
    which the family's pictures cannot be read."""

    image: str
    ids: Mapping[str, str]
    pictures: tuple[str, Mapping[str, Any]]
    processor: Mapping[str, Any] | None = None
    named: Mapping[str, str] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    needs: str | None = None
    video: str = "<|vision_start|><|video_pad|><|vision_end|>"


_QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_GRID = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
_QWEN_PICTURES = ("Qwen2VLImageProcessorPil", {**_GRID, "min_pixels": FEWEST, "max_pixels": MOST})
_QWEN = Look("<|vision_start|><|image_pad|><|vision_end|>", _QWEN_IDS, _QWEN_PICTURES)
_SOUND = {"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
_OMNI = Look(
    _QWEN.image,
    _QWEN_IDS
    | {"audio_token_id": "<|audio_pad|>", "audio_start_token_id": "<|audio_start|>"}
    | {"audio_end_token_id": "<|audio_end|>"},
    _QWEN_PICTURES,
    named=_SOUND
    | {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    | {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"},
)
_GLM_IDS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
# Of a picture and its copy, as a video has two frames a step.
_GLM_SIZE = {"shortest_edge": 2 * FEWEST, "longest_edge": 2 * MOST}
_GLM_IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
_GLM = Look(_GLM_IMAGE, _GLM_IDS, ("Glm4vImageProcessorPil", {**_GRID, "size": _GLM_SIZE}))
_GLM46 = Look(_GLM_IMAGE, _GLM_IDS, ("Glm46VImageProcessorPil", {**_GRID, "size": _GLM_SIZE}))
_IMAGE_ID = {"image_token_id": "<image>"}
_BOUNDED = {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"}
_ROWS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_TILES = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
_SPLIT = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_ROWS)
_PIXTRAL = {"size": {"longest_edge": 32}, "patch_size": {"height": 8, "width": 8}}
_INDICATORS = ("<IMG_START>", "<IMG_END>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>")

LOOKS: dict[str, Look] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    "qwen3_omni_moe_thinker": _OMNI,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": _GLM46,
    "llava": Look(
        "<image>\n",
        _IMAGE_ID,
        ("CLIPImageProcessorPil", {"size": {"shortest_edge": SIDE}, "crop_size": ONE_SIZE}),
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_next": Look(
        "<image>\n",
        _IMAGE_ID,
        (
            "LlavaNextImageProcessorPil",
            {"size": {"shortest_edge": SIDE}, "crop_size": ONE_SIZE, "image_grid_pinpoints": PINPOINTS},
        ),
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_onevision": Look(
        "<image>\n",
        {**_IMAGE_ID, "video_token_id": "<video>"},
        ("LlavaOnevisionImageProcessorPil", {"size": ONE_SIZE, "image_grid_pinpoints": PINPOINTS}),
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"},
        video="<video>",
    ),
    "gemma3": Look(
        "<start_of_image>",
        {**_IMAGE_ID, "image_token_index": "<image>", **_BOUNDED},
        ("Gemma3ImageProcessorPil", {"size": ONE_SIZE}),
        {"image_seq_length": 4},
        {"image_token": "<image>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "gemma4": Look(
        "<|image|>",
        {
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "audio_token_id": "<|audio|>",
        },
        ("Gemma4ImageProcessorPil", {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70}),
        {"image_seq_length": 70},
        {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
        video="<|video|>",
    ),
    "paligemma": Look(
        "<image>",
        {**_IMAGE_ID, "image_token_index": "<image>"},
        ("SiglipImageProcessorPil", {"size": ONE_SIZE, "image_seq_length": 16}),
        {},
        {"image_token": "<image>"},
    ),
    "idefics3": Look("<image>", _IMAGE_ID, ("Idefics3ImageProcessorPil", _TILES), {"image_seq_len": 4}, more=_SPLIT),
    "smolvlm": Look(
        "<image>",
        _IMAGE_ID,
        ("SmolVLMImageProcessorPil", _TILES),
        {"image_seq_len": 4},
        more=_SPLIT,
        needs="num2words",
        video="<video>",
    ),
    "mistral3": Look(
        "[IMG]",
        {"image_token_id": "[IMG]", "image_token_index": "[IMG]"},
        ("PixtralImageProcessorPil", _PIXTRAL),
        {"patch_size": 4, "spatial_merge_size": 2},
        more=("[IMG_BREAK]", "[IMG_END]"),
        needs="torchvision",
    ),
    "aya_vision": Look(
        "<image>",
        {"image_token_id": "<|IMG_PATCH|>", "image_token_index": "<|IMG_PATCH|>"},
        ("GotOcr2ImageProcessorPil", {"size": ONE_SIZE, "crop_to_patches": True, "max_patches": 4}),
        {"patch_size": 7, "img_size": SIDE, "downsample_factor": 2},
        more=("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL"),
    ),
    "internvl": Look(
        "<IMG_CONTEXT>\n",
        {"image_token_id": "<IMG_CONTEXT>"},
        ("GotOcr2ImageProcessorPil", {"size": ONE_SIZE, "crop_to_patches": True, "max_patches": 4}),
        {"image_seq_length": 4},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        video="<video>",
    ),
    "ovis2": Look(
        "<image>",
        {"image_token_id": "<IMG_ATOM>"},
        ("Ovis2ImageProcessorPil", {"size": ONE_SIZE, "crop_to_patches": True, "max_patches": 4}),
        {"image_seq_length": 4},
        more=("<image>", *_INDICATORS),
    ),
    "ernie4_5_vl_moe": Look(
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        {
            "image_token_id": "<|IMAGE_PLACEHOLDER|>",
            "video_token_id": "<|VIDEO_PLACEHOLDER|>",
            "image_start_token_id": "<|IMAGE_START|>",
            "image_end_token_id": "<|IMAGE_END|>",
            "video_start_token_id": "<|VIDEO_START|>",
            "video_end_token_id": "<|VIDEO_END|>",
        },
        (
            "Ernie4_5_VLMoeImageProcessorPil",
            {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": FEWEST, "longest_edge": MOST}},
        ),
        {},
        {
            "image_token": "<|IMAGE_PLACEHOLDER|>",
            "image_start_token": "<|IMAGE_START|>",
            "image_end_token": "<|IMAGE_END|>",
            "video_token": "<|VIDEO_PLACEHOLDER|>",
            "video_start_token": "<|VIDEO_START|>",
            "video_end_token": "<|VIDEO_END|>",
        },
    ),
    "minicpmv4_6": Look(
        "<|image_pad|>",
        {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
        ("MiniCPMV4_6ImageProcessorPil", {"scale_resolution": 32, "patch_size": 4, "max_slice_nums": 4}),
        {},
        {
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "image_start_token": "<image>",
            "image_end_token": "</image>",
            "slice_start_token": "<slice>",
            "slice_end_token": "</slice>",
            "image_id_start_token": "<image_id>",
            "image_id_end_token": "</image_id>",
        },
        needs="torchvision",
    ),
    "cohere2_vision": Look("<image>", _IMAGE_ID, ("Cohere2VisionImageProcessor", {}), needs="torchvision"),
    "kimi_k25": Look(_QWEN.image, _QWEN_IDS, ("KimiK25ImageProcessor", {}), needs="torchvision"),
}


def family_names() -> list[str]:
    """Families that can be made here, by their model types."""
    return sorted(name for name, look in LOOKS.items() if look.needs is None)
