"""Directories of tiny models whose videos are frames that go through the tower as pictures do, and files to read."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import av
import numpy as np
import torch
from PIL import Image
from transformers import CONFIG_MAPPING, BatchFeature
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.smolvlm import processing_smolvlm

from dhp.batch.encoder_shards import VISION, Split
from dhp.batch.reader import BatchReaderSettings, make_preprocessor, open_model
from dhp.batch.shard import Division
from dhp.config.data import DataConfig
from dhp.data.media.sources import Video
from dhp.data.read.records import Record, Turn
from dhp.data.sample.preprocess import Preprocessor
from dhp.data.sampling.sampler import BatchLayout
from dhp.models.pretrained import load_image_processor, load_tokenizer
from dhp.models.processor_files import FILE
from dhp.tiny.looks import _TILES, LOOKS, ONE_SIZE
from dhp.tiny.tiny_model import make_family

# Frames that are scaled, and normalised, one by one.
_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_PLAIN = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "resample": 3}
_FRAMES = {"size": ONE_SIZE, **_PLAIN, **_CLIP}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_SAMPLED = {"fps": 1, "max_frames": 8, "video_size": _TILES["size"]}
# What the video processors' files of tiny models say.
FRAMES: dict[str, dict[str, Any]] = {
    "internvl": {**_FRAMES, "num_frames": 6},
    "llava_onevision": _FRAMES,
    "gemma4": {
        **_PLAIN,
        **{"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70, "num_frames": 5},
        **{"image_mean": [0.0] * 3, "image_std": [1.0] * 3},
    },
    "smolvlm": {**_PLAIN, **_HALF, **_TILES, "resample": 1, "video_sampling": _SAMPLED},
}
NAMES = ("internvl", "llava_onevision", "gemma4", "smolvlm")
WORDS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "eight": 8}


@contextmanager
def spelled_numbers() -> Iterator[None]:
    """SmolVLM's processor spells how many frames there are, by a package that the tests do not need besides."""
    spell = {number: word for word, number in WORDS.items()}.__getitem__
    with patch.object(processing_smolvlm, "num2words", spell):
        yield


def save_tiny(name: str, folder: Path) -> Path:
    with patch.dict(LOOKS, {name: replace(LOOKS[name], needs=None)}):
        make_family(name, folder)
    if name in FRAMES:
        (folder / FILE).write_text(json.dumps(FRAMES[name]))
    return folder


def write_moving(path: Path, frames: int, rate: int, size: tuple[int, int] = (56, 56)) -> Path:
    """A video of frames unlike one another."""
    random = np.random.default_rng(frames)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for _ in range(frames):
            picture = random.integers(0, 255, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8)
            large = np.kron(picture, np.ones((4, 4, 1), dtype=np.uint8))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(large, format="rgb24")))
        container.mux(stream.encode())
    return path


def write_still(path: Path) -> Path:
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (40, 60, 3), dtype=np.uint8)).save(path)
    return path


def record(*parts: Path | Video | str) -> Record:
    return Record("set", 1, "line 1", (Turn("user", parts), Turn("assistant", ("A red square.",))))


def preprocessor(folder: Path, parts: tuple[str, ...] = (VISION,), **data: Any) -> Preprocessor:
    """As a run of that model with these encoders has it."""
    division = Division({part: Split() for part in parts})
    settings = BatchReaderSettings(str(folder), DataConfig(**data), BatchLayout(1, 1, 1), division, 0)
    return make_preprocessor(settings, *open_model(settings))


class FrameProcessor:
    """In the place of the library's video processor, which needs torchvision: plain arithmetic on whole frames of the
    size that the model takes."""

    model_input_names = ("pixel_values_videos",)

    def __init__(self, pictures: Any, settings: dict[str, Any]):
        self._pictures, self._settings = pictures, settings

    def __call__(self, videos: list[np.ndarray], video_metadata: list[Any], **_: Any) -> BatchFeature:
        (frames,), about = videos, {"video_metadata": video_metadata}
        if "max_soft_tokens" in self._settings:
            own = {key: self._settings[key] for key in ("max_soft_tokens", "patch_size", "pooling_kernel_size")}
            each = self._pictures(images=[Image.fromarray(frame) for frame in frames], return_tensors="pt", **own)
            places, counts = each["image_position_ids"], {"num_frames_per_video": [len(frames)]}
            soft = {"num_soft_tokens_per_video": [int(each["num_soft_tokens_per_image"][0])]}
            moving = {"pixel_values_videos": each["pixel_values"], "video_position_ids": places}
            return BatchFeature({**moving, **counts, **soft, **about})
        if "video_sampling" in self._settings:  # frames are scaled up first, and then down
            sizes = (self._settings["video_sampling"]["video_size"], self._settings["max_image_size"])
            for side in (size["longest_edge"] for size in sizes):
                scaled = [Image.fromarray(frame).resize((side, side), Image.Resampling.LANCZOS) for frame in frames]
                frames = np.stack([np.asarray(frame) for frame in scaled])
        mean, std = (torch.tensor(self._settings[key]).view(3, 1, 1) for key in ("image_mean", "image_std"))
        pixels = (torch.from_numpy(frames).permute(0, 3, 1, 2) / 255 - mean) / std
        if "video_sampling" in self._settings:
            mask = torch.ones_like(pixels[:, 0], dtype=torch.long)
            return BatchFeature({"pixel_values": pixels[None], "pixel_attention_mask": mask[None], **about})
        return BatchFeature({"pixel_values_videos": pixels[None], **about})


def library_processor(name: str, folder: Path, video_processor: Any = None, sounds: Any = None) -> Any:
    """The library's own processor of a directory."""
    kind = PROCESSOR_MAPPING[CONFIG_MAPPING[name]]
    own = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    pictures = load_image_processor(str(folder))
    parts = {"image_processor": pictures, "tokenizer": load_tokenizer(str(folder), "")}
    parts["video_processor"] = video_processor or FrameProcessor(pictures, FRAMES.get(name, {}))
    parts |= {} if sounds is None else {"feature_extractor": sounds}
    missing = {one: None for one in kind.get_attributes() if one not in parts}
    found = own(**parts, **missing, **(LOOKS[name].processor or {}))
    if name == "gemma4" and sounds is None:
        found.boa_token = found.eoa_token = "sound"  # without which it takes nothing
    return found
