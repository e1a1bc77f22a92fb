"""Slices of matrices as ordinary parameters, and one description of the whole matrix and which rank holds what.

A module computes with plain tensors, which costs a tenth of DTensor's dispatch on the host. Checkpoints, the norm and
the loss ask `as_dtensor` for the DTensor that a slice is part of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

_CUTS = "dhp_cuts"  # on a module: by parameter, its `Cut`


@dataclass(frozen=True)
class Cut:
    """How a parameter of `shape` is cut over the ranks of `mesh`; `placements` as DTensor has them."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size

    def around(self, local: Tensor) -> DTensor:
        """The DTensor of which `local` is this rank's slice, on its memory and graph."""
        strides = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=strides)


def mark_cut(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Remember that the module's parameter is this rank's slice along `dim`, one of equal ones over `mesh`."""
    shape = list(module.get_parameter(name).shape)
    shape[dim] *= mesh.size()
    mark(module, name, Cut(mesh, (Shard(dim),), torch.Size(shape)))


def mark(module: nn.Module, name: str, cut: Cut) -> None:
    """Remember how the module's parameter `name`, this rank's slice, is cut."""
    module.__dict__.setdefault(_CUTS, {})[name] = cut


def use_local_slices(model: nn.Module) -> None:
    """Put this rank's slice in the place of each parameter that is a DTensor, on the same memory.

    A parameter that two modules share stays shared.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not isinstance(parameter, DTensor):
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(parameter.detach().to_local(), parameter.requires_grad)
            mark(module, name, Cut(parameter.device_mesh, parameter.placements, parameter.shape))
            module._parameters[name] = made[id(parameter)]


def cut_of(module: nn.Module, name: str) -> Cut | None:
    """The cut of the module's own parameter `name`; None where every rank holds all of it."""
    return module.__dict__.get(_CUTS, {}).get(name)


def as_dtensor(module: nn.Module, name: str) -> Tensor:
    """The module's own parameter `name`; the DTensor that it is a slice of where it is one."""
    parameter, cut = module.get_parameter(name), cut_of(module, name)
    return parameter if cut is None else cut.around(parameter)


def as_dtensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter as `as_dtensor` has it, in the order and by the names of `named_parameters`."""
    return {name: as_dtensor(owner, own) for name, owner, own in owned_parameters(module)}


def owned_parameters(module: nn.Module) -> Sequence[tuple[str, nn.Module, str]]:
    """Each parameter's full name, the module that owns it and its name there, as `named_parameters` orders them."""
    owners = {
        (f"{prefix}." if prefix else "") + own: (owner, own)
        for prefix, owner in module.named_modules()
        for own in owner._parameters
    }
    return [(name, *owners[name]) for name, _ in module.named_parameters()]
