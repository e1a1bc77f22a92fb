"""A model on the meta device; digests of weights."""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers.utils import CONFIG_NAME, logging

from dhp.core.errors import ConfigError, ModelError
from dhp.core.parameters import AdapterSettings, is_adapter, is_inside, plain_name
from dhp.core.transformers_private import expand_plan
from dhp.models.begin_adapters import check_begin
from dhp.models.family import VISION, Family
from dhp.models.load import ReadPlan, drop_modules, drop_parameters, load_part, model_class, without_dropped
from dhp.models.lora import add_adapters, check_targets, find_targets
from dhp.models.pretrained import shapes_directory
from dhp.models.registry import load_family
from dhp.models.shape import DecoderSizes, HeldParameter, Parameter, PartShape, sum_shape


def part_shape(source: str, dropped: Sequence[str], tensor: int = 1, **how: Any) -> PartShape:
    """Count the model of `source` without the modules `dropped`, split by its tensor-parallel plan over `tensor` ranks.
    how: as `held_parameters` has it."""
    return sum_shape(held_parameters(source, dropped, tensor, **how), how.get("trained") is not None)


def held_parameters(
    source: str,
    dropped: Sequence[str],
    tensor: int = 1,
    whole_modules: Sequence[str] = (),
    added_plan: Mapping[str, str] = MappingProxyType({}),
    trained: Callable[[str], bool] | None = None,
    shared: Sequence[str] = (),
    sharing: int = 1,
    put_adapters: Callable[[nn.Module], None] = lambda _: None,
    find_quantized: Callable[[nn.Module], Collection[str]] = lambda _: (),
    find_matrices: Callable[[Mapping[str, Sequence[int]]], Collection[str]] = lambda _: (),
) -> tuple[HeldParameter, ...]:
    """The parameters of the model of `source` without the modules `dropped`, split over `tensor` ranks.

    whole_modules: (`*` for layer numbers) that every rank keeps whole. added_plan: styles of further modules. trained:
    by a parameter's name; None: all are. shared: modules whose experts so many ranks (sharing) share out. put_adapters:
    puts adapters into a model, which each rank holds whole. find_quantized: names of modules in four bits.
    find_matrices: names of matrices of hidden layers, by all shapes."""
    model = _without_weights(source, dropped)
    plan = {name: style for name, style in (model.tp_plan | dict(added_plan)).items() if name not in whole_modules}
    mesh = DeviceMesh("cpu", torch.arange(tensor), _init_backend=False, _rank=0) if tensor > 1 else None
    put_adapters(model)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    rounded = {f"{name}.weight" for name in find_quantized(model)}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    matrices, found = find_matrices(shapes), []
    for name, parameter in list(model.named_parameters()):  # a tied one comes once
        held = parameter if mesh is None or is_adapter(name) else _sharded(model, name, plan, mesh)
        split = isinstance(held, DTensor) and not all(placement.is_replicate() for placement in held.placements)
        own = held.to_local().numel() if isinstance(held, DTensor) else held.numel()
        apart = sharing > 1 and is_inside(name, shared)
        if apart:
            split, own = True, own // sharing
        trains = trained is None or trained(name)
        kinds = (split, trains, name in rounded, shapes[name], name in matrices, apart)
        found.append(HeldParameter(tuple(names[id(parameter)]), parameter.numel(), own, *kinds))
    return tuple(found)


Adapters = Mapping[str, AdapterSettings]  # by part


def list_parameters(source: str, family: Family, adapters: Adapters = MappingProxyType({})) -> tuple[Parameter, ...]:
    """All parameters of the model of `source`, in its order, with those of adapters. family: the model's, with the
    parts of the run."""
    adapt(model := _without_weights(source, ()), family, adapters)
    unused = set(_unused(model, family))
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = []
    for name, parameter in model.named_parameters():
        part = next((n for n, one in family.parts.items() if is_inside(name, one.modules)), VISION)
        used = name not in unused and not is_inside(name, family.idle)
        found.append(Parameter(name, tuple(names[id(parameter)][1:]), tuple(parameter.shape), part, used))
    return tuple(found)


def check_adapters(
    source: str, family: Family, adapters: Adapters, begin: Mapping[str, str] = MappingProxyType({}), named: str = ""
) -> None:
    """Raises ConfigError for adapters of modules that the model does not have, or that cannot have one, and for those
    that parts `begin` from, directories by part, where they are others. named: the model, in the configuration."""
    model = _without_weights(source, ())
    for name, asked in adapters.items():
        check_targets(model, family.parts[name], f"{name}.lora", asked)
    check_begin(model, family.parts, adapters, begin, named)


def adapt(model: nn.Module, family: Family, adapters: Adapters, device: str = "meta") -> None:
    """Add the parts' adapters to a model on that device; "meta": to one without weights."""
    with torch.device(device):
        for name, asked in adapters.items():
            add_adapters(model, find_targets(model, family.parts[name], asked), asked, seed=0)


def _unused(model: nn.Module, family: Family) -> Iterator[str]:
    named = dict(model.named_parameters())
    yield from (name for name, parameter in named.items() if not parameter.requires_grad)
    for part in family.parts.values():
        part.freeze_unused(model)
        yield from (name for name, p in named.items() if not p.requires_grad and is_inside(name, part.modules))
        model.requires_grad_(True)  # a part may take another's for unused, which its ranks do not hold


def decoder_sizes(source: str) -> DecoderSizes:
    """Count the decoder of `source`, piece by piece, on the meta device."""
    decoder = load_family(source).decoder
    model = _without_weights(source, ())
    count = lambda name: sum(parameter.numel() for parameter in model.get_submodule(name).parameters())
    return DecoderSizes(
        embedding=sum(map(count, (decoder.embedding, *decoder.entrance))),
        layers=tuple(count(f"{decoder.layers.path}.{layer}") for layer in range(len(decoder.layers.kinds))),
        norm=count(decoder.norm),
        head=count(decoder.head),
        tied=decoder.tied,
    )


def empty_slices(
    source: str,
    dropped: Sequence[str],
    tensor: int = 1,
    whole_modules: Sequence[str] = (),
    added_plan: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """The model of `source` on the meta device without the modules `dropped`, its parameters those of the first of
    `tensor` ranks, as `part_shape` counts them; it sums over no ranks."""
    if tensor == 1:
        return _without_weights(source, dropped)
    plan = tuple(sorted(added_plan.items()))
    return deepcopy(_sliced(source, _written_ns(source), tuple(dropped), tensor, tuple(whole_modules), plan))


@lru_cache(maxsize=2)
def _sliced(
    source: str,
    written_ns: int,
    dropped: tuple[str, ...],
    tensor: int,
    whole_modules: tuple[str, ...],
    added_plan: tuple[tuple[str, str], ...],
) -> Any:
    """Each trace of a model asks for the same slices, which take seconds. written_ns: when its configuration was."""
    model = _without_weights(source, dropped)
    plan = {name: style for name, style in (model.tp_plan | dict(added_plan)).items() if name not in whole_modules}
    mesh = DeviceMesh("cpu", torch.arange(tensor), _init_backend=False, _rank=0)
    for name, _ in list(model.named_parameters()):
        held = _sharded(model, name, plan, mesh)
        own = held.to_local() if isinstance(held, DTensor) else held
        module, _, of_module = name.rpartition(".")
        setattr(model.get_submodule(module), of_module, nn.Parameter(own.detach()))
    for linear in model.modules():
        if isinstance(linear, nn.Linear):  # adapters are made as wide as it says it is
            linear.out_features, linear.in_features = linear.weight.shape
    return model


def check_tensor_plan(
    source: str, dropped: Sequence[str], read_plan: ReadPlan, added_plan: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Let `read_plan` look at the tensor-parallel plan of the model of `source` without the modules `dropped`, as it
    will when the part is loaded. Raises what it raises."""
    model = _without_weights(source, dropped)
    read_plan(model, expand_plan(model, model.tp_plan | without_dropped(added_plan, dropped)))


def _without_weights(source: str, dropped: Sequence[str]) -> Any:
    """The model on the meta device, to be changed at will."""
    model = deepcopy(_empty(source, _written_ns(source)))
    drop_modules(model, dropped)
    drop_parameters(model, dropped)
    return model


def _written_ns(source: str) -> int:
    """When the configuration was written; 0 of a hub id."""
    file = Path(source) / CONFIG_NAME if Path(source).is_dir() else Path(source)
    return file.stat().st_mtime_ns if file.is_file() else 0


@lru_cache(maxsize=1)
def _empty(source: str, written_ns: int) -> Any:
    """A run asks for the same model some eight times before it starts. written_ns: when its configuration was."""
    with torch.device("meta"):
        return model_class(source)(AutoConfig.from_pretrained(source, trust_remote_code=False))


def _sharded(model: nn.Module, name: str, plan: dict[str, str], mesh: DeviceMesh) -> nn.Parameter:
    """The parameter as the plan's style leaves it on the first rank, which gets the longest slice."""
    module_name, _, own = name.rpartition(".")
    module = model.get_submodule(module_name)
    plain = plain_name(name)
    keys = (plain, plain_name(module_name), _generic(plain), _generic(plain_name(module_name)))
    style = next((plan[key] for key in keys if key in plan), None)
    if style is not None:
        from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

        ALL_PARALLEL_STYLES[style].shard_param(module, own, mesh)
    return module.get_parameter(own)


def _generic(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


SLOW_DISK = 100_000_000  # bytes a second of a slow disk that nodes share
PUBLISHED_BYTES = 2  # of a weight as models are published, in 16 bits


def weight_bytes(model_name: str, checkpoint: Path | None = None) -> int:
    """Bytes of the safetensors files in a model's directory, and in the checkpoint that a run continues.

    A hub id whose shape dhp ships has two bytes a parameter. Of any other it is not known without a network: 0."""
    continued = 0 if checkpoint is None else _sizes(checkpoint, "**/*.safetensors")
    if Path(model_name).is_dir():
        return continued + _sizes(Path(model_name), "*.safetensors")
    shape = shapes_directory() / f"{model_name}.json"
    if not shape.is_file():
        return continued

    return continued + PUBLISHED_BYTES * part_shape(str(shape), ()).total


def stored_dtype(model_name: str) -> torch.dtype | None:
    """The number format of all weights in a model's directory; None where they have several, and of a hub id.

    Raises ModelError for a file that cannot be read."""
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

    Raises ModelError where they cannot be read, ConfigError for a tower with dropout."""
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


_BLOCK, _BLOCKS = 1 << 16, 64  # of a file's bytes: so many blocks, evenly apart, and its head


def digest_files(folders: Iterable[str], about: Iterable[str]) -> str:
    """Digest of models by their files: name, size, and of each one's bytes 64 blocks of 64 KiB. about: more of them."""
    digest = hashlib.sha256("\n".join(about).encode())
    for folder in folders:
        path = Path(folder).expanduser()
        files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else []
        digest.update(b"" if files else folder.encode())
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as opened:
                for at in sorted({size * block // _BLOCKS for block in range(_BLOCKS)}):
                    opened.seek(at)
                    digest.update(opened.read(_BLOCK))
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
