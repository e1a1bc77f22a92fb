"""A directory's weights: bytes, format, time to read them; a digest of a tower's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers.utils import logging

from dhp.core.errors import ConfigError, ModelError
from dhp.models.family import VISION
from dhp.models.load import load_part
from dhp.models.pretrained import shapes_directory
from dhp.models.registry import load_family

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
    from dhp.models.empty import part_shape  # brings modeling code along, which takes a second

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


# Keys of config.json that do not concern the tower; unknown keys are hashed.
_ELSEWHERE = ("text_config", "_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")


def digest_tower(model_name: str, dtype: str, parts: Iterable[str]) -> str:
    """Digest of the tower and projector of a run with these parts: names, shapes, formats and bytes of the weights as
    they are loaded, the number format of the part, and the configuration.

    Raises ModelError where they cannot be read, ConfigError for a tower with dropout.
    """
    family = load_family(model_name).having(parts)
    logging.disable_progress_bar()  # of a part; every rank loads one with a progress bar later
    loaded = torch.float64 if dtype == "float64" else torch.float32
    model = load_part(model_name, (*family.outside(VISION), *family.idle), loaded)
    _refuse_dropout(model)
    config = {key: value for key, value in family.config.to_dict().items() if key not in _ELSEWHERE}
    hashed = [type(model).__name__, transformers.__version__, dtype, config]
    digest = hashlib.sha256(json.dumps(hashed, sort_keys=True, default=str).encode())
    for name, tensor in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        whole = tensor.detach().contiguous()
        digest.update(json.dumps([name, str(whole.dtype), list(whole.shape)]).encode())
        digest.update(whole.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _refuse_dropout(model: Any) -> None:
    for name, module in model.named_modules():
        chance = getattr(module, "p", None) or getattr(module, "drop_prob", None)
        if "drop" in type(module).__name__.lower() and chance:
            raise ConfigError(
                f"data.cache_features with {name} of the tower, which drops each value with a chance of {chance}: its "
                "features are others each time. Set that to 0 in the model's config.json, or leave data.cache_features "
                "out"
            )
