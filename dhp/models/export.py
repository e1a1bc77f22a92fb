"""Exports weights as a Hugging Face directory, or adapters alone."""

from __future__ import annotations

import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from dhp.core.errors import ConfigError, ModelError
from dhp.core.parameters import AdapterSettings, is_adapter, plain_name
from dhp.core.torch_private import persistent_buffers
from dhp.models.base_files import (
    BASE,
    KEYS,
    RECORD,
    StoredTensor,
    described_tensors,
    find_formats,
    find_unloaded,
    place_tensors,
    read_stored,
    round_to,
    stored_tensors,
    write_files,
    write_record,
)
from dhp.models.begin_adapters import FILE, PREFIX, saved_name
from dhp.models.config_file import read_config, set_dtype, set_text, write_config
from dhp.models.family import Family
from dhp.models.file_keys import in_file_form, loaded_names, weights_to_save
from dhp.models.load import model_class
from dhp.models.lora import adapted_modules, add_adapters, find_targets, split_targets
from dhp.models.pretrained import auxiliary_files, name_accelerator
from dhp.models.registry import load_family

if TYPE_CHECKING:
    from peft import PeftConfig

_Content = tuple[tuple[int, ...], int]  # a tensor's shape, and the crc32 of its bytes


def save_whole(
    model_dir: Path,
    weights: Mapping[str, Tensor],
    out_dir: Path,
    base: Path | None = None,
    dtype: str = BASE,
    exact: Callable[[str], Tensor | None] = lambda name: None,
) -> str:
    """Write `weights` (by module name) with the configuration, tokenizer and processors of `model_dir` to `out_dir`;
    what became of the base's other keys, in words.

    Keys are those that transformers' own `save_pretrained` writes, so `from_pretrained` reads them back; number formats
    and files those of `base`, of which keys that the model's class does not load come along, untrained.

    base: the model that training began with; None: by what `model_dir` says of its files, else formats are those of the
    weights. dtype: of `FORMATS`. exact: the
    float32 of which a weight of that name is the rounding; None: there is none.
    Raises ModelError when weights are missing or too many, or `out_dir` holds something already."""
    if out_dir.exists() and any(out_dir.iterdir()):
        raise ModelError(f"{out_dir} is not empty; give a directory that is new or empty")
    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    content = read_config(model_dir)  # as published: the library would write it anew in its version's form
    model = fill_empty(model_dir, config, content, weights)
    logging.disable_progress_bar()
    name_accelerator()
    stored = stored_tensors(base) if base is not None else described_tensors(model_dir)
    state = weights_to_save(model)
    published = in_file_form(model, state)
    _check_form(model, weights, state, published, out_dir)
    loaded = loaded_names(model, [*stored, *published])
    formats = find_formats(stored, published, loaded, dtype)
    wider = {loaded[key] for key, tensor in published.items() if formats[key].itemsize > tensor.dtype.itemsize}
    unrounded = {name: one for name in wider & state.keys() if (one := exact(name)) is not None}
    if unrounded:
        published = in_file_form(model, state | unrounded)
    unloaded = find_unloaded(stored, {key: one.shape for key, one in published.items()}, loaded, model.state_dict())

    sizes = {key: tensor.numel() * formats[key].itemsize for key, tensor in published.items()}
    sizes |= {key: stored[key].nbytes for key in unloaded.carried}
    out_dir.mkdir(parents=True, exist_ok=True)
    finished = partial(finish_tensor, published, formats, stored)
    numbers = write_files(out_dir, place_tensors(sizes, stored), finished, model.num_parameters())
    _write_beside(model, model_dir, out_dir, content, max(numbers, key=lambda one: numbers[one]))
    if stored:
        write_record(out_dir, dtype, formats, unloaded)
    return unloaded.tell()


def finish_tensor(
    published: Mapping[str, Tensor], formats: Mapping[str, torch.dtype], stored: Mapping[str, StoredTensor], key: str
) -> Tensor:
    """The tensor that is written under a key: a weight in its format, or one of the base's."""
    if key not in published:
        return read_stored(key, stored[key])
    tensor, wanted = published[key], formats[key]
    before = stored.get(key)
    wider = wanted.itemsize > tensor.dtype.itemsize
    if wider and before is not None and before.file.is_file() and before.shape == tuple(tensor.shape):
        whole = read_stored(key, before)  # what was not trained is the base's, of which this is the rounding
        if whole.dtype is wanted and torch.equal(whole.to(tensor.dtype), tensor):
            return whole
    return round_to(key, tensor, wanted)


def fill_empty(model_dir: Path, config: Any, content: dict[str, Any], weights: Mapping[str, Tensor]) -> Any:
    """The model with these weights for its own. content: of its config.json, in which head and embedding are untied
    where the weights are. Raises ModelError."""
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
    return model


def _write_beside(model: Any, model_dir: Path, out_dir: Path, content: dict[str, Any], dtype: torch.dtype) -> None:
    """Write the configuration, and what else stands beside the weights."""
    set_dtype(content, str(dtype).removeprefix("torch."))
    write_config(out_dir, content)
    if model.can_generate():
        model.generation_config.save_pretrained(out_dir)
    for file in out_dir.glob("*.safetensors"):  # which safetensors lets their owner alone read
        shutil.copymode(out_dir / "config.json", file)
    _copy_beside(auxiliary_files(str(model_dir)), out_dir)


def _lost(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    held = dict(model.named_parameters(remove_duplicate=False))
    return [n for n, one in weights.items() if n in held and held[n] is not one and not _same(held[n], one)]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or (not one.is_meta and torch.equal(one, other))


def _check_form(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    published: Mapping[str, Tensor],
    out_dir: Path,
) -> None:
    """Compare what is to be written with the weights by shapes and bytes: keys are the library's, and some families are
    cut or joined in files, which is known by shapes that are none of the model's. Raises ModelError."""
    lost = _lost(model, weights)
    written, wanted = Counter(map(_content, published.values())), Counter(map(_content, state.values()))
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


def _copy_beside(files: Sequence[Path], out_dir: Path) -> None:
    """All files but config.json, which was just written with the number format of the weights, and the record of an
    export that training began with."""
    for file in files:
        if file.name not in ("config.json", KEYS, RECORD):
            shutil.copy(file, out_dir / file.name)


Adapters = Mapping[str, AdapterSettings]  # by part


def merge(model_dir: str, weights: Mapping[str, Tensor], adapters: Adapters) -> dict[str, Tensor]:
    """All weights of the model of `model_dir`, with what was trained: adapters added to their matrices by peft's own
    arithmetic, other weights in the place of the model's. In the directory's number format, rounded once.

    weights: of a checkpoint, by name. Raises ModelError where they are another model's, ConfigError for adapters of
    matrices in four bits."""
    refuse_quantized(adapters)
    model = _load(model_dir)
    formats = {name: tensor.dtype for name, tensor in held_tensors(model).items()}
    for part, own in targets_of(model, load_family(model_dir), adapters).items():
        add_adapters(model, own, adapters[part], seed=0)
    _widen(parameter for name, parameter in model.named_parameters() if is_adapter(name))
    _fill(model, weights, model_dir)
    for _, layer in adapted_modules(model):  # one at a time, or the whole model would be there in 32 bits
        before = {parameter: parameter.dtype for parameter in layer.parameters()}
        _widen(before)
        layer.merge(safe_merge=True)
        for parameter, dtype in before.items():
            parameter.data = parameter.data.to(dtype)
    held = {plain_name(name): tensor for name, tensor in held_tensors(model).items() if not is_adapter(name)}
    return {name: tensor.detach().to(formats[name]) for name, tensor in held.items()}


def _widen(parameters: Iterable[nn.Parameter]) -> None:
    """Or 16 bits would round adapters, their product and the sum."""
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def held_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers."""
    return {**dict(model.named_parameters()), **persistent_buffers(model)}


def save_adapter(model_dir: str, weights: Mapping[str, Tensor], adapters: Adapters, out_dir: Path) -> int:
    """Write `weights` as an ordinary adapter of peft's, which `PeftModel.from_pretrained(model, out_dir)` loads; how
    many tensors.

    Other weights than adapters that are not as in the model of `model_dir` come along, module by module (peft's
    modules_to_save). Raises ModelError where peft has no way to say what was trained, or would read something else."""
    if out_dir.exists() and any(out_dir.iterdir()):
        raise ModelError(f"{out_dir} is not empty; give a directory that is new or empty")
    model = _load(model_dir)
    targets = targets_of(model, load_family(model_dir), adapters)
    whole = _changed_modules(model, {n: tensor for n, tensor in weights.items() if not is_adapter(n)})
    config = _peft_config(model_dir, targets, adapters, list(whole))
    trained = {name: tensor for name, tensor in weights.items() if is_adapter(name)}
    kept = trained | {name: tensor for own in whole.values() for name, tensor in own.items()}
    named = {saved_name(name): tensor.contiguous() for name, tensor in kept.items()}
    _check_read(model, config, named, trained)
    out_dir.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(out_dir))
    save_file(named, out_dir / FILE, metadata={"format": "pt"})
    shutil.copymode(out_dir / "adapter_config.json", out_dir / FILE)  # safetensors lets its owner alone read it
    return len(named)


def _load(model_dir: str) -> PreTrainedModel:
    try:
        return model_class(model_dir).from_pretrained(model_dir, dtype="auto")
    except OSError as error:
        raise ModelError(
            f"{model_dir}: the model that the adapters belong to cannot be read ({error}). Say by --base where it is"
        ) from error


def _peft_config(
    model_dir: str, targets: Mapping[str, tuple[str, ...]], adapters: Adapters, whole: list[str]
) -> PeftConfig:
    """One configuration for all parts: the last part's; rank and alpha of others may differ."""
    from peft import LoraConfig

    (*others, last), every = targets, {name: part for part, own in targets.items() for name in own}
    for other in others:
        if (adapters[other].dora, adapters[other].rslora) != (adapters[last].dora, adapters[last].rslora):
            raise ModelError(
                f"the adapters of {other} and {last} differ in dora or rslora, of which an adapter of peft's has one "
                "for all. Export without --adapter: they are merged into the model then"
            )
    own = adapters[last]
    return LoraConfig(
        r=own.rank,
        lora_alpha=own.alpha,
        lora_dropout=own.dropout,
        use_dora=own.dora,
        use_rslora=own.rslora,
        **split_targets(list(every)),
        rank_pattern={name: adapters[part].rank for name, part in every.items() if part != last},
        alpha_pattern={name: adapters[part].alpha for name, part in every.items() if part != last},
        modules_to_save=whole or None,
        base_model_name_or_path=model_dir,
        inference_mode=True,
    )


def _changed_modules(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Modules of which some weight is no longer the model's, with all of their weights."""
    held = dict(model.named_parameters())
    changed = [n for n, tensor in weights.items() if n not in held or not torch.equal(held[n].to(tensor), tensor)]
    found = {}
    for name in changed:
        owner = plain_name(name).rpartition(".")[0]
        module = model.get_submodule(owner)
        if plain_name(name) != name or any(module.children()):
            raise ModelError(
                f"{plain_name(name)} was trained beside the adapters, which no adapter of peft's can say: it keeps "
                "other weights as whole modules. Export without --adapter: the adapters are merged into the model then"
            )
        own = {n: p.detach() for n, p in module.named_parameters(prefix=owner)}
        found[owner] = {n: weights.get(n, value) for n, value in own.items()}
    return found


def _check_read(
    model: PreTrainedModel, config: PeftConfig, named: dict[str, Tensor], trained: Mapping[str, Tensor]
) -> None:
    """Load the adapter with peft into the model, which is of no further use then. named: tensors as in the file.
    trained: adapters by their names here. Raises ModelError unless each is loaded where it was trained."""
    from peft import get_peft_model, set_peft_model_state_dict

    try:
        with warnings.catch_warnings(action="ignore"):  # the loaded weights are checked below
            by_peft = get_peft_model(model, deepcopy(config))
            set_peft_model_state_dict(by_peft, named)
    except ValueError as error:
        raise ModelError(_tell_other(model, str(error))) from error
    read = {name.removeprefix(PREFIX): p for name, p in by_peft.named_parameters() if is_adapter(name)}
    other = [n for n, tensor in trained.items() if n not in read or not torch.equal(read[n], tensor.to(read[n]))]
    other += [name for name in read if name not in trained]
    if other:
        raise ModelError(_tell_other(model, f"{plain_name(other[0])} would be another"))


def _tell_other(model: PreTrainedModel, what: str) -> str:
    return (
        f"peft would not read these adapters of a {model.config.model_type} model as they were trained ({what}): in "
        "some kinds with experts it takes names as gate_proj for those of experts, wherever they stand. Export without "
        "--adapter: the adapters are merged into the model then"
    )


def refuse_quantized(adapters: Adapters) -> None:
    """Raises ConfigError for adapters of matrices in four bits."""
    rounded = [part for part, asked in adapters.items() if asked.quantization is not None]
    if rounded:
        raise ConfigError(
            f"the adapters of {', '.join(rounded)} were trained beside matrices in four bits "
            f"({rounded[0]}.lora.quantization); added to those of the model they would not compute what was trained. "
            "Export them by --adapter, and load them beside the model in four bits: docs/what-is-trained.md#adapters"
        )


def targets_of(model: nn.Module, family: Family, adapters: Adapters) -> dict[str, tuple[str, ...]]:
    """What has an adapter, by part (`dhp.models.lora.find_targets`)."""
    return {part: find_targets(model, family.parts[part], asked) for part, asked in adapters.items()}


def _fill(model: nn.Module, weights: Mapping[str, Tensor], model_dir: str) -> None:
    held = dict(model.named_parameters(remove_duplicate=False))
    other = [n for n, tensor in weights.items() if n not in held or held[n].shape != tensor.shape]
    missing = [n for n in held if is_adapter(n) and n not in weights]
    if other or missing:
        raise ModelError(
            f"{model_dir} is not the model that these adapters were trained beside: it lacks {other[:3]} in their "
            f"shapes, and they lack {missing[:3]}. Give the directory of that model by --base"
        )
    with torch.no_grad():
        for name, tensor in weights.items():
            held[name].copy_(tensor)
