"""A preprocessor of the tiny model's kind, without a model."""

from dataclasses import replace
from typing import Any

from transformers import Qwen2VLImageProcessorPil

from dhp.config.data import DataConfig
from dhp.data.media.frames import FrameSampling
from dhp.data.sample.picture_inputs import ModelMedia
from dhp.data.sample.preprocess import Preprocessor
from dhp.data.sample.sample import Videos
from dhp.data.sample.tokens import NO_ACTORS
from dhp.models.families.qwen2_5_vl import qwen2_5_vl
from dhp.tiny.tiny_model import tiny_config

CORPUS = ["What colour is the circle?", "Is it blue or red?", "You are a helpful assistant.", "user system"]


def make_preprocessor(tokenizer: Any, **changes: Any) -> Preprocessor:
    """With patches of 14 pixels and one token for 2 × 2 patches."""
    processor = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=168 * 168)
    family = qwen2_5_vl(tiny_config(tokenizer)).processor
    videos = Videos(family.video_token_id, FrameSampling(fps=2.0, max_frames=768, group=2), family.video_patches)
    known = {
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "image_tokens": lambda grid: grid[0] * grid[1] * grid[2] // 4,
        "patches": lambda output: (output["pixel_values"], tuple(map(int, output["image_grid_thw"][0]))),
    }
    known |= {"image_processor": processor, "videos": videos, "no_audio": NO_ACTORS}
    return changed_preprocessor(tokenizer, ModelMedia(**known), **changes)


def changed_preprocessor(tokenizer: Any, media: ModelMedia, **changes: Any) -> Preprocessor:
    """With other values of the media, or of the data's section; or another tokenizer."""
    of_media = {key: value for key, value in changes.items() if key in ModelMedia.__dataclass_fields__}
    of_data = {key: value for key, value in changes.items() if key not in {*of_media, "tokenizer"}}
    data = DataConfig(**{"video_whole_frames": None, **of_data})
    return Preprocessor(changes.get("tokenizer", tokenizer), replace(media, **of_media), data)
