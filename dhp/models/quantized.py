"""Frozen matrices in four bits (Dettmers et al. 2023, "QLoRA").

The one file that imports it. It relies on the following, each with a canary test where the package is installed: its
layer is a linear layer, whose weight is rounded when it moves to a device; and peft's layer for linear modules, around
it, computes the same as peft's own for such layers."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import nn

from dhp.config.parts import DECODER
from dhp.core.errors import ConfigError
from dhp.core.parameters import NF4, AdapterSettings, is_adapter, is_inside, plain_name
from dhp.models.family import Family
from dhp.models.lora import is_router
from dhp.models.types import LayerParts

# Four bits a value; for each block of 64 a scale of 8 bits, and of 256 such scales one of 32.
BYTES_A_VALUE = 1 / 2 + 1 / 64 + 4 / (64 * 256)


def require_package(key: str) -> None:
    """Raises ConfigError where the package that `key`=nf4 asks for is not here. No GPU is touched."""
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"{key}={NF4}: bitsandbytes, which keeps matrices in four bits, is not installed. Install it on each node "
            f"with `pip install bitsandbytes`, or leave {key} out: the matrices stay in the part's dtype."
        )


def check_quantized(family: Family, adapters: Mapping[str, AdapterSettings]) -> None:
    """Raises ConfigError for matrices in four bits in a part whose layers read weights directly."""
    decoder, asked = family.decoder, adapters.get(DECODER)
    if asked is None or asked.quantization is None or not (decoder.experts or decoder.mixers):
        return
    what = "experts, which are one matrix," if decoder.experts else f"mixers ({', '.join(decoder.mixers)}), which"
    raise ConfigError(
        f"{DECODER}.lora.quantization={asked.quantization} with a {family.config.model_type} model: its layers have "
        f"{what} take their weights as numbers. Leave {DECODER}.lora.quantization out."
    )


def find_quantized(model: nn.Module, layers: LayerParts, trains: Callable[[str], bool]) -> tuple[str, ...]:
    """Names of the linear modules of the layers whose weights are not trained, in the model's order. trains: by a
    parameter's name. Without adapters, routers, modules with a forward of their own, and those whose weight the code
    around them reads: it would find packed bits."""
    return tuple(
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and "forward" not in vars(module) and is_inside(name, [layers.path])
        if not (is_adapter(name) or is_router(plain_name(name)) or trains(f"{name}.weight"))
        if not _is_read(model, plain_name(name))
    )


def quantize(
    model: nn.Module,
    layers: LayerParts,
    asked: AdapterSettings,
    trains: Callable[[str], bool],
    dtype: torch.dtype,
    device: torch.device,
    key: str,
) -> None:
    """Replace the modules of `find_quantized` by bitsandbytes' layers on `device`, one matrix after another, so that
    not all are in memory in full. Each is rounded to `dtype`, in which the part computes, and that to four bits.

    key: of the setting, in errors. Raises ConfigError where the package is missing or cannot be loaded."""
    if asked.quantization != NF4:
        return
    require_package(key)
    try:
        package = _package()
    except (ImportError, OSError) as error:  # built for another torch or CUDA
        raise ConfigError(
            f"{key}={NF4}: bitsandbytes cannot be loaded: {error}. Install a build for this machine, or leave {key} out"
        ) from error
    for name in find_quantized(model, layers, trains):
        owner, _, own = name.rpartition(".")
        plain = model.get_submodule(name)
        setattr(model.get_submodule(owner), own, _in_four_bits(package, plain, dtype).to(device))


def _is_read(model: nn.Module, name: str) -> bool:
    """Whether the class of the module around the linear one of that name reads its weight."""
    owner, _, own = name.rpartition(".")
    return f".{own}.weight" in _source(type(model.get_submodule(owner)))


@cache
def _source(kind: type[nn.Module]) -> str:
    return inspect.getsource(kind)


def _in_four_bits(package: ModuleType, plain: nn.Linear, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        made = package.nn.Linear4bit(
            plain.in_features, plain.out_features, bias=False, compute_dtype=dtype, quant_type=NF4
        )
    weight = plain.weight.detach().to(dtype)
    made.weight = package.nn.Params4bit(
        weight, requires_grad=False, compress_statistics=True, quant_type=NF4, module=made
    )
    made.bias = plain.bias
    return made.train(plain.training)


@cache
def _package() -> ModuleType:
    import bitsandbytes

    return bitsandbytes
