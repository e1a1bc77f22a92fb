"""Loads one part of a model from its directory.

The model class itself stays untouched: a part is a subclass whose constructor drops the modules of
the other part and whose distribution hook shards what remains over the mesh it is given. Loading,
key renaming between checkpoint and module names, and reading only this rank's slice of each
safetensors file are transformers' own (`from_pretrained`)."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from dhp.core.errors import ModelError
from dhp.core.parameters import is_inside
from dhp.core.transformers_private import (
    IGNORED_KEYS,
    TIED_KEYS,
    class_of,
    ignored_patterns,
    set_tensor_plan,
    tensor_plan,
    ties_of,
)
from dhp.models.pretrained import read_model_config

ReadPlan = Callable[[nn.Module, Mapping[str, str]], dict[str, str]]


class Absent(nn.Module):
    """Placeholder for a module that this part does not hold."""

    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raises RuntimeError: calling it is a bug of the caller."""
        raise RuntimeError(f"{self._name} is not in this part of the model")


class _OneMesh:
    """Implements transformers' mesh manager with the one mesh that dhp made."""

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh

    def get_mesh(self, _names: str | Sequence[str]) -> DeviceMesh:
        return self.mesh


def model_class(model_name: str) -> type[PreTrainedModel]:
    """The transformers class that `config.json` of `model_name` names."""
    config = read_model_config(model_name)
    try:
        return class_of(AutoModelForImageTextToText, type(config))
    except KeyError:
        raise ModelError(
            f"{model_name}: model_type {config.model_type!r} is no vision-language model that transformers "
            "can load by AutoModelForImageTextToText; give the directory of one that is"
        ) from None


def load_part(
    model_name: str,
    dropped: Sequence[str],
    dtype: torch.dtype,
    tensor_mesh: DeviceMesh | None = None,
    tensor_plan: dict[str, str] | None = None,
    read_plan: ReadPlan = lambda _, plan: dict(plan),
) -> PreTrainedModel:
    """Load `model_name` without the modules named in `dropped`, on CPU, in training mode. Single layers may be among
    them (`Decoder.absent`).

    With a `tensor_mesh` of more than one rank, transformers' tensor-parallel plan is applied over it and
    each rank reads only its own slices, onto the mesh's device; its sharded parameters are DTensors on that mesh.
    `tensor_plan` adds to that plan, or replaces rules of it (module name, with `*` for layer numbers → style), for the
    modules that this part has; `read_plan` has the last word: it is given the model and its plan by full names, and
    answers with the one to apply.

    Raises ModelError when the directory lacks a weight of this part, holds one of another shape, or cannot be read."""
    base = model_class(model_name)
    generic, exact = _by_kind(without_dropped(tensor_plan or {}, dropped))
    part = type(base.__name__, (base,), _overrides(base, dropped, tensor_mesh, exact, read_plan))
    sharded = tensor_mesh is not None and tensor_mesh.size() > 1
    distributed = DistributedConfig(tp_size=tensor_mesh.size(), tp_plan=generic or None) if sharded else None
    load = partial(
        part.from_pretrained,
        model_name,
        dtype=dtype,
        distributed_config=distributed,
        ignore_mismatched_sizes=True,  # reported below, by name, instead of by transformers without one
        output_loading_info=True,
    )
    try:
        model, info = _with_attention(load)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{model_name}: the weights cannot be read: {error}") from error
    _refuse_incomplete(model_name, info)
    drop_parameters(model, dropped)
    for parameter in model.parameters():  # some of which the library keeps in float32 whatever is asked for
        parameter.data = parameter.data.to(dtype)
    return model.train()


def _with_attention(load: Callable[..., Any]) -> Any:
    """Build with sdpa, or eager for a model whose constructor refuses it: Gemma 2 would lose its soft cap. In the
    decoder dhp's own attention replaces either."""
    try:
        return load(attn_implementation="sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return load(attn_implementation="eager")


def _by_kind(plan: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Rules for modules with `*` for every number, which is all that transformers takes, and rules for single ones."""
    exact = {name: style for name, style in plan.items() if any(part.isdigit() for part in name.split("."))}
    return {name: style for name, style in plan.items() if name not in exact}, exact


def _overrides(
    base: type[PreTrainedModel],
    dropped: Sequence[str],
    mesh: DeviceMesh | None,
    exact_plan: dict[str, str],
    read_plan: ReadPlan,
) -> dict[str, Any]:
    def build(self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        drop_modules(self, dropped)

    def prepare(cls: type, config: DistributedConfig | None, device_map: Any = None) -> tuple[Any, Any, Any]:
        if config is None:
            return config, device_map, None
        # No device map, which would demand another package: slices go to the mesh's device when they become DTensors.
        return config, None, _OneMesh(mesh)

    def resolve(self: PreTrainedModel, config: DistributedConfig) -> tuple[dict[str, str], ...]:
        """The plan by full names of modules and of their parameters."""
        tensor, *others = base._resolve_parallel_plans(self, config)
        for name, style in exact_plan.items():
            module = self.get_submodule(name)
            tensor |= {name: style} | {f"{name}.{own}": style for own, _ in module.named_parameters(recurse=False)}
        return read_plan(self, tensor), *others

    def parameter(self: PreTrainedModel, name: str) -> Any:
        """Experts, [experts, out, in], as this rank holds them: transformers tells by the shape whether what was read
        is to be transposed, and a slice was read."""
        found = base.get_parameter(self, name)
        return found.to_local() if isinstance(found, DTensor) and found.ndim == 3 else found

    unexpected = [rf"^(.*\.)?{re.escape(name.removeprefix('model.'))}\." for name in dropped]
    return {
        "__init__": build,
        "__module__": base.__module__,
        "prepare_distribute_model": classmethod(prepare),
        "get_parameter": parameter,
        "_resolve_parallel_plans": resolve,
        TIED_KEYS: _ties_without(base, dropped),
        IGNORED_KEYS: [*ignored_patterns(base), *unexpected],
    }


def _ties_without(base: type[PreTrainedModel], dropped: Sequence[str]) -> dict[str, str]:
    ties = ties_of(base)
    kept = {target: source for target, source in ties.items() if not is_inside(target, dropped)}
    return {target: source for target, source in kept.items() if not is_inside(source, dropped)}


def drop_modules(model: PreTrainedModel, dropped: Sequence[str]) -> None:
    """Take the modules of these names out of `model`, and their rules out of its tensor-parallel plan.

    The layers that remain of a list keep their names: the list skips the numbers of those that went."""
    for name in dropped:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        if child in owner._parameters:
            continue  # the model's constructor and its first weights need it: see `drop_parameters`
        if isinstance(owner, nn.ModuleList):
            delattr(owner, child)
        else:
            setattr(owner, child, Absent(name))
    model.init_parallel_plans()
    # A child keeps the rules of its own children as they were when it was made.
    set_tensor_plan(model, without_dropped(tensor_plan(model), dropped))


def drop_parameters(model: PreTrainedModel, dropped: Sequence[str]) -> None:
    """Take those of `dropped` out of `model` that are parameters, not modules (LLaVA-NeXT's newline)."""
    for name in dropped:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        if child in owner._parameters:
            owner._parameters[child] = None


def without_dropped(plan: Mapping[str, str], dropped: Sequence[str]) -> dict[str, str]:
    """Of a tensor-parallel plan, the rules for modules that are there."""
    return {name: style for name, style in plan.items() if not is_inside(name, dropped)}


def _refuse_incomplete(model_name: str, info: dict[str, Any]) -> None:
    for kind, remedy in (
        ("missing_keys", "the directory does not hold the whole model: download or save it again"),
        ("mismatched_keys", "config.json and the safetensors files belong to different models"),
        ("unexpected_keys", "config.json and the safetensors files belong to different models"),
    ):
        keys = sorted(str(key) for key in info.get(kind) or ())
        if keys:
            shown = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
            raise ModelError(f"{model_name}: {kind.replace('_', ' ')}: {shown}. {remedy[0].upper()}{remedy[1:]}.")


def cast_reals(model: nn.Module, dtype: torch.dtype) -> None:
    """Bring all real numbers of a model to a format. `Module.to` would take the imaginary part off complex ones, as
    those that turn positions in Llama 4's tower are."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
