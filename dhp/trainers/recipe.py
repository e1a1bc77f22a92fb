"""Steps of the recipe that makes a stage: what is trained, and who keeps gradients and states of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dhp.parallel.comm.mesh import replicas_mesh
from dhp.parallel.optimizer.frozen import Frozen
from dhp.parallel.optimizer.fsdp import FullySharded
from dhp.parallel.optimizer.protocol import StageOptimizer, TiedOptimizer
from dhp.parallel.optimizer.replicated import MakeOptimizer, Replicated
from dhp.parallel.optimizer.zero import ZeroSharded
from dhp.trainers.optimizer import make_adamw
from dhp.trainers.settings import PROJECTOR, OptimizerSettings, StageSettings

DEEPSPEED = "deepspeed"  # a zero_engine; the other is fsdp


def freeze(model: nn.Module, train: str, projector: Sequence[str]) -> None:
    """Take the gradient off parameters that are not to be trained. A stage that trains nothing freezes in `Frozen`."""
    if train != PROJECTOR:
        return
    for name, parameter in model.named_parameters():
        inside = any(name.startswith(f"{module}.") for module in projector)
        parameter.requires_grad_(parameter.requires_grad and inside)


def freeze_modules(model: nn.Module, modules: Sequence[str]) -> None:
    """Take the gradient off all parameters of some modules."""
    for name, parameter in model.named_parameters():
        if any(name.startswith(f"{module}.") for module in modules):
            parameter.requires_grad_(False)


def make_optimizer(
    model: nn.Module, layers: Sequence[nn.Module], settings: StageSettings, mesh: DeviceMesh
) -> StageOptimizer:
    """The optimizer of the stage, with as much of its states on this rank as zero_stage leaves there."""
    dtype, make = getattr(torch, settings.dtype), optimizer_maker(settings.update)
    if not settings.spec.trains:
        passes = any(settings.chain.goes_back(node) for node in settings.spec.nodes)
        return Frozen(model, dtype, passes)
    if not settings.zero_stage:
        group = replicas_mesh(mesh).get_group()
        return Replicated(model, make, group, dtype, exclusive=settings.exclusive_sums)
    if settings.zero_engine == DEEPSPEED:
        return ZeroSharded(model, make, settings.zero_stage, dtype)
    tensor_rank = mesh.get_local_rank("tensor")
    return FullySharded(model, layers, make, replicas_mesh(mesh), tensor_rank, settings.zero_stage, dtype)


def tie_weight(optimizer: TiedOptimizer, model: nn.Module, settings: StageSettings) -> None:
    """Tell the optimizer of the weight that this stage shares with another, where there is one: the embedding, which
    is the head too."""
    for tie in settings.chain.ties:
        if settings.spec.name in (tie.owner, tie.other):
            weight = model.get_input_embeddings().weight
            name = next(name for name, parameter in model.named_parameters() if parameter is weight)
            optimizer.tie(name, owns=settings.spec.name == tie.owner)


def optimizer_maker(settings: OptimizerSettings) -> MakeOptimizer:
    """AdamW as configured, for whatever parameters an optimizer hands it."""
    return partial(
        make_adamw,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
