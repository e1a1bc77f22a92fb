"""The device mesh of one stage: data × ring × ulysses × tensor ranks, tensor innermost."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from dhp.base.degrees import AXES, Degrees


def build_mesh(device_type: str, degrees: Degrees) -> DeviceMesh:
    """Mesh over all ranks of the default process group, with the axes of `AXES`.

    Raises ValueError when the group has another number of ranks than the degrees multiply to.
    """
    world = dist.get_world_size()
    if world != degrees.world:
        raise ValueError(f"data × ring × ulysses × tensor = {degrees.world} ranks, but the process group has {world}")
    shape = tuple(getattr(degrees, axis) for axis in AXES)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
    for axis in AXES:
        _wait_as_long(mesh.get_group(axis))
    return mesh


def replicas_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that hold the same slices as this one, those that differ from it in any axis but tensor: one axis."""
    if mesh["tensor"].size() == 1:
        return DeviceMesh.from_group(dist.group.WORLD, mesh.device_type, mesh_dim_names=("replicas",))
    replicas = mesh["data", "ring", "ulysses"]._flatten("replicas")
    _wait_as_long(replicas.get_group())
    return replicas


def sequence_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that share a sequence with this one, Ulysses innermost."""
    return _wait_as_long(mesh["ring", "ulysses"]._flatten("sequence").get_group())


def replica_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that work on the same samples as this one, tensor innermost."""
    return _wait_as_long(mesh["ring", "ulysses", "tensor"]._flatten("replica").get_group())


def experts_mesh(mesh: DeviceMesh, expert: int) -> DeviceMesh:
    """The ranks of a stage that is split by data alone: copies × expert. Neighbours share out the experts; those of one
    place among them hold the same ones."""
    shape = (mesh.size() // expert, expert)
    found = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("copies", "expert"))
    for axis in ("copies", "expert"):
        _wait_as_long(found.get_group(axis))
    return found


def _wait_as_long(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Give a group the default group's timeout: meshes make theirs with the backend's own, 10 or 30 minutes."""
    timeout = max(backend.options._timeout for backend in _backends(dist.group.WORLD))
    _set_pg_timeout(timeout, group)
    return group


def _backends(group: dist.ProcessGroup) -> list[dist.Backend]:
    return [group._get_backend(device) for device in group._device_types]
