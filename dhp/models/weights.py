"""Bytes and format of the weights that a model's parts read at start, and how long that may take."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dhp.base.errors import ModelError
from dhp.models.config_source import shapes_directory

SLOW_DISK = 100_000_000  # bytes a second of a slow disk that nodes share
PUBLISHED_BYTES = 2  # of a weight as models are published, in 16 bits


def weight_bytes(model_name: str, checkpoint: Path | None = None) -> int:
    """Bytes of the safetensors files in a model's directory, and in the checkpoint that a run continues.

    A hub id whose shape dhp ships has two bytes a parameter. Of any other it is not known without a network: 0.
    """
    continued = 0 if checkpoint is None else _sizes(checkpoint, "**/*.safetensors")
    if Path(model_name).is_dir():
        return continued + _sizes(Path(model_name), "*.safetensors")
    shape = shapes_directory() / f"{model_name}.json"
    if not shape.is_file():
        return continued
    from dhp.models.shape import part_shape  # brings modeling code along, which takes a second

    return continued + PUBLISHED_BYTES * part_shape(str(shape), ()).total


def stored_dtype(model_name: str) -> torch.dtype | None:
    """The number format of all weights in a model's directory; None where they have several, and of a hub id.

    Raises ModelError for a file that cannot be read.
    """
    found = set()
    for file in sorted(Path(model_name).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                found |= {_FORMATS.get(opened.get_slice(name).get_dtype()) for name in opened.keys()}
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: the weights cannot be read: {error}") from error
    found.discard(None)  # integers
    return found.pop() if len(found) == 1 else None


_FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def start_limit_s(base_s: float, nbytes: int) -> float:
    """The longest wait for parts that read `nbytes` of weights, seconds: `base_s` where there is nothing to read."""
    return base_s + nbytes / SLOW_DISK


def _sizes(folder: Path, pattern: str) -> int:
    return sum(file.stat().st_size for file in folder.glob(pattern))
