"""What is read: pictures like photographs, a video, conversations, and a model's files with a published vocabulary."""

import json
from pathlib import Path

import av
import numpy as np
from PIL import Image

from dhp.tiny.tiny_model import make_tiny_model
from experiments.micro.reading import conversations
from tests.golden.vocabularies import QWEN_TEMPLATE, load_qwen

SIZES = {"small": (448, 336), "middle": (1280, 960), "large": (4032, 3024)}  # the last is a telephone's
VIDEO = "video"
VIDEO_FRAMES, VIDEO_SIZE, KEY_FRAMES = 2400, (320, 240), 60  # 96 s; a key frame each so many
DIFFERENT = 8  # pictures of a size
TOKENS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
ROWS_OF_VOCABULARY = 151_936  # of Qwen2-VL


def make_model(folder: Path) -> Path:
    """A tiny Qwen2.5-VL's configuration and image processor, with the published vocabulary; no weights are read."""
    make_tiny_model(folder, ["dog"])
    tokenizer = load_qwen()
    tokenizer.chat_template, tokenizer.pad_token = QWEN_TEMPLATE, "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for section in (config, config["text_config"]):
        section |= {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items() if name in section}
        section["vocab_size"] = ROWS_OF_VOCABULARY
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def make_samples(folder: Path, kind: str, count: int) -> Path:
    """Annotations of a question and an answer of some 60 words about a picture each; the file."""
    folder.mkdir(exist_ok=True)
    names = [f"{kind}{number}.{'mp4' if kind == VIDEO else 'jpg'}" for number in range(DIFFERENT)]
    for number, name in enumerate(names):
        _film(folder / name, number) if kind == VIDEO else _photograph(folder / name, SIZES[kind], number)
    rows = []
    for number, record in enumerate(conversations(count, 1)):
        (question,), (answer,) = (turn.parts for turn in record.turns)
        mark, key = ("<video>", "video") if kind == VIDEO else ("<image>", "image")
        talk = [{"from": "human", "value": f"{mark}\n{question}"}, {"from": "gpt", "value": answer}]
        rows.append({"id": str(number), key: names[number % DIFFERENT], "conversations": talk})
    file = folder / f"{kind}.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    return file


def _photograph(file: Path, size: tuple[int, int], seed: int) -> None:
    """Smooth shapes with grain, so that it is about as many bytes a pixel as a camera's."""
    rng = np.random.default_rng(seed)
    shapes = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    Image.blend(shapes, Image.effect_noise(size, 20).convert("RGB"), 0.3).save(file, quality=90)


def _film(file: Path, seed: int) -> None:
    """A shape that moves."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height = VIDEO_SIZE
        stream.pix_fmt, stream.gop_size = "yuv420p", KEY_FRAMES
        picture = Image.effect_noise(VIDEO_SIZE, 40 + seed).convert("RGB")
        pixels = np.asarray(picture)
        for number in range(VIDEO_FRAMES):
            frame = av.VideoFrame.from_ndarray(np.roll(pixels, number, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
