"""Writes a whole model from its parts' weights as an ordinary Hugging Face directory."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from zlib import crc32

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.utils import logging

from dhp.core.errors import ModelError
from dhp.models.config_file import read_config, set_dtype, set_text, write_config
from dhp.models.load import model_class
from dhp.models.pretrained import auxiliary_files, name_accelerator

_Content = tuple[tuple[int, ...], int]  # a tensor's shape, and the crc32 of its bytes


def save_whole(model_dir: Path, weights: Mapping[str, Tensor], out_dir: Path) -> None:
    """Write `weights` (by module name) with the configuration, tokenizer and processors of `model_dir` to `out_dir`.

    transformers' own `save_pretrained` names and splits the files, so `from_pretrained` reads them back.
    Raises ModelError when weights are missing or too many, or `out_dir` holds something already.
    """
    if out_dir.exists() and any(out_dir.iterdir()):
        raise ModelError(f"{out_dir} is not empty; give a directory that is new or empty")
    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    content = read_config(model_dir)  # as published: the library would write it anew in its version's form
    with torch.device("meta"):
        model = model_class(str(model_dir))(config)
    result = model.load_state_dict(dict(weights), strict=False, assign=True)
    model.tie_weights()
    if _lost(model, weights):  # the files hold another head than the embedding, though the configuration ties them
        content["tie_word_embeddings"] = False
        set_text(content, config, {"tie_word_embeddings": False})
        for section in (config, config.get_text_config()):
            section.tie_word_embeddings = False
        with torch.device("meta"):
            model = model_class(str(model_dir))(config)
        result = model.load_state_dict(dict(weights), strict=False, assign=True)
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
    set_dtype(content, read_config(out_dir)["dtype"])
    write_config(out_dir, content)
    _check_written(model, weights, out_dir)
    for file in out_dir.glob("*.safetensors"):  # which safetensors lets their owner alone read
        shutil.copymode(out_dir / "config.json", file)
    _copy_beside(auxiliary_files(str(model_dir)), out_dir)


def _lost(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """Weights in whose place the model has others."""
    held = dict(model.named_parameters(remove_duplicate=False))
    return [n for n, one in weights.items() if n in held and held[n] is not one and not _same(held[n], one)]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or (not one.is_meta and torch.equal(one, other))


def _check_written(model: nn.Module, weights: Mapping[str, Tensor], out_dir: Path) -> None:
    """Compare the files with the weights by shapes and bytes: names are the library's, and some families are cut or
    joined as they are written, which is known by shapes that are none of the model's. Raises ModelError."""
    lost = _lost(model, weights)
    written: Counter[_Content] = Counter()
    for file in out_dir.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            written.update(_content(tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118
    distinct = {id(tensor): tensor for tensor in (*model.parameters(), *persistent_buffers(model).values())}
    wanted = Counter(map(_content, distinct.values()))
    lacking, other = wanted - written, written - wanted
    changed = {shape for shape, _ in lacking} & {shape for shape, _ in other}
    if lost or changed or _numbers(lacking) != _numbers(other):
        raise ModelError(
            f"{out_dir} would be another model than the one that was trained: {_numbers(written)} of "
            f"{_numbers(wanted)} numbers were written, {sorted(changed)[:3] or 'none'} are shapes of tensors of other "
            f"bytes, and {lost[:3] or 'no weights'} were replaced. Report the family; the checkpoint has all of them"
        )


def _content(tensor: Tensor) -> _Content:
    return tuple(tensor.shape), crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def _numbers(tensors: Counter[_Content]) -> int:
    return sum(prod(shape) * count for (shape, _), count in tensors.items())


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
