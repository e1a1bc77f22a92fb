"""Small annotation files, pictures and a tokenizer, made where a test needs them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerBase

from dhp.data.sample.preprocess import Preprocessor
from dhp.tiny.tiny_model import make_tokenizer
from tests.data.sample.made import CORPUS, make_preprocessor


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
    return lambda **changes: make_preprocessor(**{"tokenizer": tokenizer, **changes})
