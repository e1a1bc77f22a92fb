"""Weights of running parts as an export has them, a layer at a time."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from dhp.core.errors import ModelError
from dhp.core.parameters import is_adapter, is_inside, plain_name
from dhp.models.base_files import (
    BASE,
    StoredTensor,
    find_directory,
    find_formats,
    find_unloaded,
    read_stored,
    stored_tensors,
)
from dhp.models.config_file import read_config
from dhp.models.empty import stored_dtype
from dhp.models.export import Adapters, fill_empty, finish_tensor, held_tensors, refuse_quantized, targets_of
from dhp.models.file_keys import in_file_form, loaded_names, weights_to_save
from dhp.models.load import model_class
from dhp.models.lora import adapted_modules, add_adapters
from dhp.models.pretrained import config_source, read_model_config
from dhp.models.registry import load_family

Read = Callable[[Sequence[str]], Mapping[str, Tensor]]  # whole tensors, by name; those of a layer at most
_EXPORT = "Save a checkpoint, and export that"
_LAYER = re.compile(r"(.*?\.\d+)\.")


def stream_published(
    model_name: str,
    held: Mapping[str, Tensor],
    read: Read,
    exact: Callable[[str, Tensor], Tensor | None],
    adapters: Adapters,
    trains: Callable[[str], bool],
) -> Iterator[tuple[str, Tensor]]:
    """By key, what an export of these weights writes. held: what there is, on the meta device. exact: as `save_whole`
    has it, of a name and its weight. Raises ModelError where they are another model's."""
    folder = find_directory(model_name)
    stored = {} if folder is None else stored_tensors(folder)
    of_ranks = held
    if adapters:
        held, read = _merging(model_name, held, read, adapters, trains)
    config, content = read_model_config(model_name), read_config(Path(config_source(model_name)))
    marks = {name: _mark(one) for name, one in held.items()}
    model = fill_empty(Path(model_name), config, content, marks)
    names = {mark.data_ptr(): name for name, mark in marks.items()}  # a tied weight is held by one of its names
    state = weights_to_save(model)
    meta = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in state.items()}
    published = in_file_form(model, meta)
    loaded = loaded_names(model, [*stored, *published])
    for name in (name for name in of_ranks if name != plain_name(name)):  # beside which adapters stand
        _require_exact(name, of_ranks[name], [stored[key] for key in stored if loaded[key] == plain_name(name)])
    formats = find_formats(stored, published, loaded, BASE)
    wider = {loaded[key] for key, one in published.items() if formats[key].itemsize > one.dtype.itemsize}
    groups: dict[str, list[str]] = {}
    for name in state:
        groups.setdefault(_group(name), []).append(name)
    left = set(published)
    for group in groups.values():
        found = read([names[state[name].data_ptr()] for name in group])
        tensors = {name: found[names[state[name].data_ptr()]] for name in group}
        tensors |= {name: one for name in wider & tensors.keys() if (one := exact(name, tensors[name])) is not None}
        for key, tensor in in_file_form(model, tensors).items():
            if key not in left or tensor.shape != published[key].shape:
                raise ModelError(f"{key} is cut from weights of several layers. {_EXPORT}")
            left.remove(key)
            yield key, finish_tensor({key: tensor}, formats, stored, key)
    if left:
        raise ModelError(f"{sorted(left)[0]} is made of weights of several layers. {_EXPORT}")
    shapes = {key: one.shape for key, one in published.items()}
    for key in find_unloaded(stored, shapes, loaded, model.state_dict()).carried:
        yield key, read_stored(key, stored[key])


def _mark(like: Tensor) -> Tensor:
    """A tensor that takes no memory; no two are equal."""
    return torch.full((), torch.nan if like.is_floating_point() else 0, dtype=like.dtype).expand(like.shape)


def _require_exact(name: str, of_ranks: Tensor, files: Sequence[StoredTensor]) -> None:
    """Raise ModelError where ranks have rounded a matrix that its adapter is added to."""
    wide = [one.kind for one in files if one.dtype is not None and one.dtype.itemsize > of_ranks.dtype.itemsize]
    if wide:
        raise ModelError(
            f"{name} is {of_ranks.dtype} on the ranks and {wide[0]} in files, which adapters are added to. {_EXPORT}"
        )


def _group(name: str) -> str:
    """The layer of a weight, or of an adapter beside one; elsewhere its module."""
    of = plain_name(re.sub(r"\.lora_.*", ".weight", name))
    layer = _LAYER.match(of)
    return of.rpartition(".")[0] if layer is None else layer[1]


def _merging(
    model_name: str, held: Mapping[str, Tensor], read: Read, adapters: Adapters, trains: Callable[[str], bool]
) -> tuple[dict[str, Tensor], Read]:
    """The same of the model with its adapters added to their matrices, as `dhp.models.export.merge` adds them. What is
    neither adapted nor trained keeps its format: files have it."""
    refuse_quantized(adapters)
    dtype = stored_dtype(model_name) or read_model_config(model_name).dtype
    with torch.device("meta"):
        model = model_class(model_name)(read_model_config(model_name))
    for part, targets in targets_of(model, load_family(model_name), adapters).items():
        add_adapters(model, targets, adapters[part], seed=0)
    groups, plain = dict[str, list[str]](), dict[str, Tensor]()
    for name in held_tensors(model):
        groups.setdefault(_group(name), []).append(name)
        if name not in held:
            raise ModelError(f"{name} is on no rank, as zero_stage=3 of DeepSpeed keeps it. {_EXPORT}")
        if not is_adapter(name):
            changes = name != plain_name(name) or trains(name)
            plain[plain_name(name)] = held[name].to(dtype) if changes else held[name]

    def read_merged(names: Sequence[str]) -> Mapping[str, Tensor]:
        inside = groups[_group(names[0])]
        for name, tensor in read(inside).items():
            _put(model, name, tensor.to(torch.promote_types(tensor.dtype, torch.float32)))
        for name, layer in adapted_modules(model):
            if any(is_inside(one, [name]) for one in inside):
                layer.merge(safe_merge=True)
        now = held_tensors(model)
        found = {of: now[one].detach().to(plain[of].dtype) for one in inside if (of := plain_name(one)) in plain}
        for name in inside:
            _put(model, name, now[name].to("meta"))
        return found

    return plain, read_merged


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    held = module._parameters if own in module._parameters else module._buffers
    held[own] = nn.Parameter(tensor, requires_grad=False) if held is module._parameters else tensor
