"""Writes a whole model from its parts' weights as an ordinary Hugging Face directory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.utils import logging

from dhp.core.errors import ModelError
from dhp.models.load import model_class
from dhp.models.pretrained import auxiliary_files, name_accelerator


def save_whole(model_dir: Path, weights: Mapping[str, Tensor], out_dir: Path) -> None:
    """Write `weights` (by module name) with the configuration, tokenizer and processors of `model_dir` to `out_dir`.

    transformers' own `save_pretrained` names and splits the files, so `from_pretrained` reads them back.
    Raises ModelError when weights are missing or too many, or `out_dir` holds something already.
    """
    if out_dir.exists() and any(out_dir.iterdir()):
        raise ModelError(f"{out_dir} is not empty; give a directory that is new or empty")
    with torch.device("meta"):
        model = model_class(str(model_dir))(AutoConfig.from_pretrained(model_dir, trust_remote_code=False))
    result = model.load_state_dict(dict(weights), strict=False, assign=True)
    model.tie_weights()
    held = [*model.named_parameters(), *persistent_buffers(model).items()]
    missing = [name for name, tensor in held if tensor.is_meta]
    if missing or result.unexpected_keys:
        raise ModelError(
            f"the weights do not fit the model of {model_dir}: missing {missing[:5]}, "
            f"unexpected {list(result.unexpected_keys)[:5]}"
        )
    logging.disable_progress_bar()
    name_accelerator()
    model.save_pretrained(out_dir)
    for file in out_dir.glob("*.safetensors"):  # which safetensors lets their owner alone read
        shutil.copymode(out_dir / "config.json", file)
    _copy_beside(auxiliary_files(str(model_dir)), out_dir)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are saved with a model's weights, though nothing trains them."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def _copy_beside(files: Sequence[Path], out_dir: Path) -> None:
    """All files but config.json, which was just written with the number format of the weights."""
    for file in files:
        if file.name != "config.json":
            shutil.copy(file, out_dir / file.name)
