"""Writes down rotary positions as publishers' code has them: `python -m tests.golden.positions FAMILY FILE SOURCE`.

FILE is the publisher's, as SOURCE names it; tests/golden/positions/FAMILY.json holds what it said. No test imports it.
"""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

Row = list[tuple[Any, ...]]  # ("text", tokens) | ("image", grid) | ("video", grid, seconds of a step)

IMAGE, VIDEO, START, END = 151655, 151656, 151652, 151653
ROWS: dict[str, Row] = {
    "text": [("text", 9)],
    "an image": [("text", 3), ("image", (1, 4, 6)), ("text", 4)],
    "several images": [("image", (1, 8, 4)), ("text", 2), ("image", (1, 4, 4)), ("image", (1, 2, 10)), ("text", 3)],
    "a video of 4": [("text", 3), ("video", (4, 4, 4), 1.0), ("text", 4)],
    "a video of 16": [("text", 3), ("video", (16, 4, 4), 1.0), ("text", 4)],
    "a video of 64": [("text", 3), ("video", (64, 4, 4), 1.0), ("text", 4)],
    "a wide video": [("video", (2, 4, 20), 0.5), ("text", 4)],
    "an image and a video": [("image", (1, 6, 4)), ("text", 2), ("video", (8, 4, 6), 1.0), ("text", 5)],
    "a video and an image": [("video", (8, 4, 4), 2.0), ("text", 2), ("image", (1, 4, 8)), ("text", 5)],
    "two videos": [("video", (6, 4, 4), 1.0), ("text", 1), ("video", (10, 2, 4), 0.5), ("text", 2)],
    "fractions of a second": [("video", (7, 2, 2), 0.3), ("text", 1), ("video", (9, 2, 4), 1.7), ("text", 2)],
    "frames of a film": [("text", 1), ("video", (12, 2, 2), 2 / 23.976), ("text", 2)],
}


def by_qwen(function: str, apart: bool) -> Any:
    """Reads rows by a function of qwen-vl-finetune/qwenvl/data/rope2d.py. apart: each step of a video has text (its
    time) and the tokens of a picture around it."""

    def find(module: ModuleType, row: Row) -> tuple[list[int], np.ndarray]:
        ids: list[int] = []
        for kind, what, *_ in row:
            if kind == "text":
                ids += [7] * what
                continue
            t, h, w = what
            token, steps = (IMAGE, 1) if kind == "image" else (VIDEO, t if apart else 1)
            for _ in range(steps):
                ids += [7, 7] if apart and kind == "video" else []
                ids += [START, *[token] * (t * h * w // 4 // steps), END]
        grids = {kind: [what for of, what, *_ in row if of == kind] for kind in ("image", "video")}
        images, videos = (torch.tensor(grids[kind]) if grids[kind] else None for kind in grids)
        seconds = [more[0] for kind, _, *more in row if kind == "video"]
        found, _ = getattr(module, function)(2, torch.tensor([ids]), images, videos, seconds or None)
        return ids, found[:, 0].numpy()

    return find


class Letters:
    """A tokenizer of one token a letter."""

    ignored_index = 0

    def tokenize(self, text: str) -> list[str]:
        return list(text)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        named = {"<|IMAGE_PLACEHOLDER|>": IMAGE, "<|IMAGE_START|>": START, "<|IMAGE_END|>": END}
        named |= {"<|VIDEO_START|>": START, "<|VIDEO_END|>": END}
        return named.get(tokens, 7) if isinstance(tokens, str) else [7 for _ in tokens]


class Patches:
    """An image processor whose pictures have 14 pixels a patch, and no values."""

    def get_smarted_resize(self, height: int, width: int, **_: Any) -> Any:
        return (height, width), (height // 14, width // 14)

    def preprocess(self, images: Any = None, videos: Any = None, **more: Any) -> dict[str, np.ndarray]:
        grids, kind = more["predetermined_grid_thw"], "image" if videos is None else "video"
        values = "pixel_values" if videos is None else "pixel_values_videos"
        return {values: np.zeros((1, 1)), f"{kind}_grid_thw": np.array([[len(grids), *grids[0]]])}


def by_ernie(module: ModuleType, row: Row) -> tuple[list[int], np.ndarray]:
    """Reads rows by the processor of paddleformers/transformers/ernie4_5_moe_vl/processor.py: a video has two frames a
    step."""
    from PIL import Image

    around = {
        "image": "<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>",
        "video": "<|VIDEO_START|><|video@placeholder|><|VIDEO_END|>",
    }
    text = "".join("x" * what if kind == "text" else around[kind] for kind, what, *_ in row)
    images = [Image.new("RGB", (w * 14, h * 14)) for kind, (_, h, w), *_ in _pictures(row) if kind == "image"]
    videos = [
        np.zeros((2 * t, h * 14, w * 14, 3), dtype=np.uint8)
        for kind, (t, h, w), *_ in _pictures(row)
        if kind == "video"
    ]
    processor = module.Ernie4_5_VLProcessor(Patches(), Letters())
    found = processor([text], images, videos)
    ids, kinds = (np.array(found[name]).reshape(-1) for name in ("input_ids", "token_type_ids"))
    ids = [VIDEO if token == IMAGE and kind == 2 else int(token) for token, kind in zip(ids, kinds, strict=True)]
    return ids, np.array(found["position_ids"]).reshape(-1, 3).T


def _pictures(row: Row) -> Row:
    return [part for part in row if part[0] != "text"]


class _Base:
    """What the processor inherits of its library."""

    def __init__(self, image_processor: Any, tokenizer: Any, **_: Any):
        self.image_processor, self.tokenizer = image_processor, tokenizer


def _beside_ernie() -> None:
    """Modules that the processor's file imports, as far as positions need them: Paddle is not here."""
    folder = "paddleformers.transformers"
    parts = {
        "feature_extraction_utils": {"BatchFeature": lambda data, tensor_type=None: data},
        "image_utils": {"ChannelDimension": SimpleNamespace(LAST="last")},
        "processing_utils": {"ProcessorMixin": _Base},
        "ernie4_5_moe_vl.vision_process": dict.fromkeys(
            ("RAW_IMAGE_DIR", "get_downloadable", "read_frames_paddlecodec", "read_video_paddlecodec")
        )
        | {"render_frame_timestamp": None},
    }
    for name in ("paddleformers", folder, f"{folder}.ernie4_5_moe_vl"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = []
    for name, content in parts.items():
        sys.modules[f"{folder}.{name}"] = ModuleType(name)
        vars(sys.modules[f"{folder}.{name}"]).update(content)


FAMILIES: dict[str, tuple[str, Any]] = {
    "qwen2_vl": ("rope2d", by_qwen("get_rope_index_2", apart=False)),
    "qwen2_5_vl": ("rope2d", by_qwen("get_rope_index_25", apart=False)),
    "qwen3_vl": ("rope2d", by_qwen("get_rope_index_3", apart=True)),
    "ernie4_5_vl_moe": ("paddleformers.transformers.ernie4_5_moe_vl.processor", by_ernie),
}


def main(family: str, file: str, source: str) -> None:
    """Write the family's table beside this file."""
    name, find = FAMILIES[family]
    if name != "rope2d":
        _beside_ernie()
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = []
    for name, row in ROWS.items():
        ids, found = find(module, row)
        axes = dict(zip(("time", "height", "width"), found.tolist(), strict=True))
        rows.append({"row": name, "parts": row, "ids": ids, **axes})
    made = {"source": source, "command": f"python -m tests.golden.positions {family} FILE SOURCE"}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    path = Path(__file__).parent / "positions" / f"{family}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{"made": {json.dumps(made)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
