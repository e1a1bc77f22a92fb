"""Writes down how many tokens publishers' code gives a picture: `python -m tests.golden.sizes FAMILY SOURCE FILE…`.

FILEs are the publisher's, as SOURCE names them; tests/golden/sizes/FAMILY.json holds what they said. No test imports
this."""

import ast
import json
import math
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

SIZES = [
    *((640, 480), (480, 640), (1280, 720), (336, 336), (1, 1), (50, 70), (1000, 10), (27, 301), (448, 448), (449, 447)),
    *((800, 1333), (2000, 2000), (1920, 1080), (333, 777), (1024, 256), (97, 1200), (672, 336), (3001, 1203)),
]  # (width, height), pixels
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]  # LLaVA-NeXT's
ONEVISION = [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)]


def take(file: str, *names: str, **beside: Any) -> SimpleNamespace:
    """Functions of a file, without what else it imports or does. beside: names that they use."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    chosen = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    constants = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]
    found: dict[str, Any] = {**vars(typing), "math": math, "torch": torch, **beside}
    body: list[ast.stmt] = [*constants, *chosen]
    exec(compile(ast.Module(body, type_ignores=[]), file, "exec"), found)
    return SimpleNamespace(**{name: found[name] for name in names})


def qwen(factor: int, file: str) -> Callable[[int, int], int]:
    """Tokens by qwen_vl_utils/vision_process.py."""
    rounds = ("round_by_factor", "ceil_by_factor", "floor_by_factor")
    given = take(file, "smart_resize", *rounds)

    def count(width: int, height: int) -> int:
        h, w = given.smart_resize(height, width, factor)
        return int(h * w / factor**2)

    return count


def ernie(file: str) -> Callable[[int, int], int]:
    """Tokens by paddleformers' ernie4_5_moe_vl/image_processor.py, with the bounds of its processor."""
    given = take(file, "smart_resize", logger=SimpleNamespace(info=lambda *_: None))

    def count(width: int, height: int) -> int:
        h, w = given.smart_resize(height, width, 28, 4 * 28 * 28, 6177 * 28 * 28)
        return int(h * w / 28**2)

    return count


def internvl(file: str) -> Callable[[int, int], int]:
    """Tokens by internvl_chat/internvl/train/dataset.py: 256 a tile, 12 tiles at most and a thumbnail."""
    given = take(file, "dynamic_preprocess", "find_closest_aspect_ratio")
    return lambda width, height: (
        256 * len(given.dynamic_preprocess(Image.new("RGB", (width, height)), 1, 12, 448, use_thumbnail=True))
    )


def anyres(side: int, pinpoints: Any, most: int | None, *files: str) -> Callable[[int, int], int]:
    """Tokens by llava/mm_utils.py and `unpad_image` of llava/model/llava_arch.py, with the lines of
    `prepare_inputs_labels_for_multimodal` between them. side: tokens of a tile; most: of anyres_max."""
    import re

    shape = take(files[0], "get_anyres_image_grid_shape", "select_best_resolution", re=re, ast=ast)
    unpad = take(files[1], "unpad_image")
    pixels = 336 if side == 24 else 384

    def count(width: int, height: int) -> int:
        across, down = shape.get_anyres_image_grid_shape((width, height), pinpoints, pixels)
        _, h, w = unpad.unpad_image(torch.empty(1, down * side, across * side), (width, height)).shape
        times = math.sqrt(h * w / (most * side**2)) if most else 1.0
        h, w = (int(h // times), int(w // times)) if times > 1.1 else (h, w)
        return int(side**2 + h * (w + 1))

    return count


def ovis(file: str) -> Callable[[int, int], int]:
    """Tokens by Ovis2's base_visual_tokenizer.py: 256 a tile, with 9 tiles at most and the whole picture."""
    given = take(file, "preprocess_image", PIL=SimpleNamespace(Image=Image))
    shown = lambda image, size, return_tensors: {"pixel_values": torch.empty(1, 3, size["height"], size["width"])}
    own = SimpleNamespace(
        image_processor=SimpleNamespace(preprocess=shown),
        get_image_size=lambda: (448, 448),
        construct_image_placeholders=lambda grid: grid,
    )

    def count(width: int, height: int) -> int:
        pixels, _ = given.preprocess_image(own, Image.new("RGB", (width, height)))
        return 256 * len(pixels)

    return count


def mistral(file: str) -> Callable[[int, int], int]:
    """Tokens by mistral_common/tokens/tokenizers/image.py, without breaks of rows, as Mistral Small 3.1 has them."""
    given = take(file, "_image_to_num_tokens", Image=Image)
    settings = SimpleNamespace(max_image_size=1540, image_patch_size=14, spatial_merge_size=2)
    own = SimpleNamespace(image_config=settings)

    def count(width: int, height: int) -> int:
        across, down = given._image_to_num_tokens(own, SimpleNamespace(size=(width, height)))
        return int(across * down)

    return count


def gemma4(file: str) -> Callable[[int, int], int]:
    """Tokens by gemma/gm/nn/gemma4/vision/_preprocessing.py: 280 at most, a token of 3 × 3 patches."""
    given = take(file, "get_target_dimensions")

    def count(width: int, height: int) -> int:
        h, w = given.get_target_dimensions(height, width, 16, 280 * 9, 3)
        return int(h * w / 48**2)

    return count


_MERGED = {"patch_size": 14, "merge_size": 2}
# Of each family: what its configuration and its image processor have, as models are published; and who counts.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[..., Callable[[int, int], int]]]] = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl"),
        ({"patch_size": 14}, {"min_pixels": 3136, "max_pixels": 12845056, **_MERGED}, lambda file: qwen(28, file)),
    ),
    "qwen3_vl": (
        {"patch_size": 16},
        {"size": {"shortest_edge": 4096, "longest_edge": 16777216}, "patch_size": 16, "merge_size": 2},
        lambda file: qwen(32, file),
    ),
    "ernie4_5_vl_moe": (
        {"patch_size": 14},
        {"size": {"shortest_edge": 3136, "longest_edge": 4842768}, **_MERGED},
        ernie,
    ),
    "internvl": (
        {"image_size": [448, 448], "patch_size": [14, 14]},
        {
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 12,
            "image_seq_length": 256,
            "size": {"height": 448, "width": 448},
        },
        internvl,
    ),
    "llava_next": (
        {"image_size": 336, "patch_size": 14, "image_grid_pinpoints": [[b, a] for a, b in PINPOINTS]},
        {
            "patch_size": 14,
            "image_grid_pinpoints": [[b, a] for a, b in PINPOINTS],
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
        },
        lambda *files: anyres(24, PINPOINTS, None, *files),
    ),
    "llava_onevision": (
        {"image_size": 384, "patch_size": 14, "image_grid_pinpoints": ONEVISION},
        {
            "num_image_tokens": 729,
            "vision_aspect_ratio": "anyres_max_9",
            "image_grid_pinpoints": ONEVISION,
            "size": {"height": 384, "width": 384},
        },
        lambda *files: anyres(27, ONEVISION, 9, *files),
    ),
    "ovis2": (
        {"image_size": 448, "patch_size": 14},
        {
            "crop_to_patches": True,
            "max_patches": 9,
            "use_covering_area_grid": True,
            "image_seq_length": 256,
            "size": {"height": 448, "width": 448},
        },
        ovis,
    ),
    "mistral3": (
        {"image_size": 1540, "patch_size": 14},
        {"size": {"longest_edge": 1540}, "patch_size": {"height": 14, "width": 14}},
        mistral,
    ),
    "gemma4": ({"patch_size": 16}, {"max_soft_tokens": 280, "patch_size": 16, "pooling_kernel_size": 3}, gemma4),
}


def main(family: str, source: str, *files: str) -> None:
    """Write the family's table beside this file."""
    config, settings, make = FAMILIES[family]
    count, rows = make(*files), []
    for width, height in SIZES:
        try:
            rows.append({"size": [width, height], "tokens": count(width, height)})
        except (ValueError, AssertionError, ZeroDivisionError, RuntimeError) as error:
            rows.append({"size": [width, height], "refused": f"{type(error).__name__}: {error}"})
    made = {"source": source, "command": f"python -m tests.golden.sizes {family} SOURCE FILE…"}
    lines = ",\n".join(json.dumps(row) for row in rows)
    path = Path(__file__).parent / "sizes" / f"{family}.json"
    path.parent.mkdir(exist_ok=True)
    given_to = {"made": made, "config": config, "processor": settings}
    head = ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in given_to.items())
    path.write_text(f'{{{head},\n"pictures": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
