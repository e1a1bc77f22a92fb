"""Kernels of a stage: chosen once, where it is made, and named for the run's first lines."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import nn

from dhp.base.messages import KernelUse
from dhp.parallel.attention.kernels import segment_kernel
from dhp.parallel.experts.modules import GATE_UP, takes_groups
from dhp.parallel.kernels.replace import left_to_compiler, replace_kernels
from dhp.trainers.settings import StageSettings


def place_kernels(
    model: nn.Module, settings: StageSettings, dtype: torch.dtype, ours: bool, mixers: Collection[str] = ()
) -> tuple[KernelUse, ...]:
    """Put the kernels for norms, rotary positions and gates in, and name all that the stage computes with.

    ours: whether its attention is this project's. mixers: classes of modules that carry state along a row. All ranks of
    the stage together. Raises PartFailed where a kernel that was asked for does not serve.
    """
    device = torch.device(settings.device)
    backend = segment_kernel(settings.attention_backend, device, dtype) if ours else "the library's"
    wanted = left_to_compiler(settings.kernels) if settings.compiled else settings.kernels
    elementwise = replace_kernels(model, device, dtype, dist.group.WORLD, wanted)
    return (
        KernelUse("attention", backend, len(settings.spec.layers)),
        *_experts(model, dtype),
        *_mixers(model, mixers),
        *elementwise,
        *_patches(model),
    )


def _experts(model: nn.Module, dtype: torch.dtype) -> tuple[KernelUse, ...]:
    weights = [
        getattr(module, GATE_UP)
        for module in model.modules()
        if isinstance(getattr(module, GATE_UP, None), nn.Parameter)
    ]
    if not weights:
        return ()
    return (
        KernelUse(
            "experts", "grouped product" if takes_groups(weights[0], dtype) else "expert by expert", len(weights)
        ),
    )


def _mixers(model: nn.Module, classes: Collection[str]) -> tuple[KernelUse, ...]:
    """The library takes kernels for them from packages of its own choice, where these are installed."""
    count = sum(type(module).__name__ in classes for module in model.modules())
    if not count:
        return ()
    lacking = [package for package in ("fla", "causal_conv1d") if find_spec(package) is None]
    if not lacking:
        return (KernelUse("delta net", "fla", count),)
    faster = f"delta net by {' and '.join(lacking)} on GPUs, which the library uses where it is installed"
    return (KernelUse("delta net", "the library's", count, faster),)


def _patches(model: nn.Module) -> tuple[KernelUse, ...]:
    count = sum(isinstance(module, nn.Conv2d | nn.Conv3d) and "forward" in vars(module) for module in model.modules())
    return (KernelUse("patches", "product", count),) if count else ()
