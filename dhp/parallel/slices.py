"""Parameters as DTensors, also those that something else than DTensor cut: who holds which slice, told in one way."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

_CUT = "dhp_cut"  # on a module: by parameter, the mesh over which it is cut in equal slices, and along which dimension


def mark_cut(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Remember that the module's parameter is this rank's slice along `dim`, one of equal ones over `mesh`."""
    module.__dict__.setdefault(_CUT, {})[name] = (mesh, dim)


def laid_out(module: nn.Module, name: str) -> Tensor:
    """The module's own parameter `name`; a DTensor on the parameter's memory and graph where it is marked as cut."""
    parameter = module.get_parameter(name)
    if name not in module.__dict__.get(_CUT, {}):
        return parameter
    mesh, dim = module.__dict__[_CUT][name]
    return DTensor.from_local(parameter, mesh, [Shard(dim)], run_check=False)


def all_laid_out(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter as `laid_out` has it, in the order and by the names of `named_parameters`."""
    owners = {
        (f"{prefix}." if prefix else "") + name: (owner, name)
        for prefix, owner in module.named_modules()
        for name in owner._parameters
    }
    return {name: laid_out(*owners[name]) for name, _ in module.named_parameters()}
