"""Small annotation files, pictures and a tokenizer, made where a test needs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerBase, Qwen2VLImageProcessorPil

from dhp.data.media.taking import Taking
from dhp.data.preprocess import Preprocessor, Videos
from dhp.models.qwen2_5_vl import qwen2_5_vl
from dhp.models.tiny import make_tokenizer, tiny_config

CORPUS = ["What colour is the circle?", "Is it blue or red?", "You are a helpful assistant.", "user system"]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A data_path with a.png (56 × 56), b.jpg (112 × 56) and sub/c.png (84 × 84)."""
    folder = tmp_path / "images"
    (folder / "sub").mkdir(parents=True)
    for name, size in (("a.png", (56, 56)), ("b.jpg", (112, 56)), ("sub/c.png", (84, 84))):
        Image.new("RGB", size, (200, 30, 40)).save(folder / name)
    return folder


@pytest.fixture
def write_json(tmp_path: Path) -> Callable[..., Path]:
    """write_json(samples, name) -> path of an annotation file with them; .jsonl gets one a line."""

    def write(samples: list[Any], name: str = "annotations.json") -> Path:
        lines = name.endswith(".jsonl")
        text = "".join(json.dumps(s) + "\n" for s in samples) if lines else json.dumps(samples)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


@pytest.fixture
def write_video() -> Callable[..., Path]:
    """write_video(path, frames, rate, size) -> path of a video; frame n is grey, and the brighter the later."""

    def write(path: Path, frames: int = 8, rate: int = 4, size: tuple[int, int] = (56, 56)) -> Path:
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=rate)
            stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
            for number in range(frames):
                picture = np.full((size[1], size[0], 3), 20 + 10 * number % 230, dtype=np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        return path

    return write


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer(CORPUS, vocab_size=400)


@pytest.fixture(scope="session")
def preprocessor(tokenizer: PreTrainedTokenizerBase) -> Callable[..., Preprocessor]:
    """preprocessor(**bounds) with patches of 14 pixels and one token for 2 × 2 patches."""
    processor = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=168 * 168)
    image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    family = qwen2_5_vl(tiny_config(tokenizer)).processor
    videos = Videos(family.video_token_id, Taking(fps=2.0, max_frames=768, group=2), family.video_patches)

    def make(**changes: Any) -> Preprocessor:
        arguments = {"tokenizer": tokenizer, "image_processor": processor, "videos": videos, **changes}
        return Preprocessor(
            image_token_id=image_token_id,
            image_tokens=lambda grid: grid[0] * grid[1] * grid[2] // 4,
            patches=lambda output: (output["pixel_values"], tuple(map(int, output["image_grid_thw"][0]))),
            **arguments,
        )

    return make
