"""The device mesh of a stage, and differentiable collectives."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dhp.core.axes import MESH, OF_ROWS, OF_TOKENS, Degrees
from dhp.core.torch_private import limit_group, longest_timeout
from dhp.core.tracing import COLLECTIVE, EXCHANGE_TAG, span


def build_mesh(device_type: str, degrees: Degrees) -> DeviceMesh:
    """Mesh over all ranks of the default process group, with the dimensions `MESH`.

    Raises ValueError when the group has another number of ranks than the degrees multiply to."""
    world = dist.get_world_size()
    if world != degrees.world:
        raise ValueError(f"{' × '.join(MESH)} = {degrees.world} ranks, but the process group has {world}")
    mesh = init_device_mesh(device_type, degrees.along(*MESH), mesh_dim_names=MESH)
    for axis in MESH:
        _wait_as_long(mesh.get_group(axis))
    return mesh


def replicas_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that hold the same slices as this one, those that differ from it in any axis but tensor: one axis."""
    if mesh["tensor"].size() == 1:
        return DeviceMesh.from_group(dist.group.WORLD, mesh.device_type, mesh_dim_names=("replicas",))
    replicas = mesh[OF_TOKENS]._flatten("replicas")
    _wait_as_long(replicas.get_group())
    return replicas


def sequence_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that share a sequence with this one, Ulysses innermost."""
    return _wait_as_long(mesh[OF_ROWS]._flatten("sequence").get_group())


def replica_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that work on the same samples as this one, tensor innermost."""
    return _wait_as_long(mesh[*OF_ROWS, "tensor"]._flatten("replica").get_group())


HOLDERS = "holders"


def neighbours_mesh(mesh: DeviceMesh, size: int, name: str) -> DeviceMesh:
    """All ranks as copies × so many neighbours along `data`, which share something out, × tensor ranks: those of one
    place among neighbours and tensor ranks hold the same, whichever rows or tokens of a row they have. name: of the
    second dimension. Neighbours and tensor ranks together are one dimension, `HOLDERS`, too."""
    data, tensor = mesh["data"].size(), mesh["tensor"].size()
    ranks = mesh.mesh.view(data // size, size, -1, tensor).transpose(1, 2).reshape(-1, size, tensor)
    found = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("copies", name, "tensor"))
    for group in (*found.get_all_groups(), found[name, "tensor"]._flatten(HOLDERS).get_group()):
        _wait_as_long(group)
    return found


def _wait_as_long(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Give a group the default group's timeout: meshes make theirs with the backend's own, 10 or 30 minutes."""
    limit_group(group, longest_timeout(dist.group.WORLD))
    return group


def _must_stage(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """gloo moves CPU memory only; ranks that share one GPU cannot use NCCL and stage their tensors."""
    return tensor.is_cuda and dist.get_backend(group) == "gloo"


def exchange_rows(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """All-to-all without autograd: `send[r]` rows go to rank r, `receive[r]` rows come from it, in rank order."""
    staged = _must_stage(rows, group)
    source = rows.contiguous().cpu() if staged else rows.contiguous()
    target = source.new_empty((sum(receive), *rows.shape[1:]))
    if dist.get_backend(group) == "gloo":
        with span("exchange", COLLECTIVE):
            _exchange_by_messages(source.split(list(send)), target.split(list(receive)), group)
    else:
        dist.all_to_all_single(target, source, list(receive), list(send), group=group)
    return target.to(rows.device) if staged else target


def _exchange_by_messages(going: Sequence[Tensor], coming: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """All-to-all of what goes to and comes from each rank, ready to receive before anything is sent.

    gloo's own sends first. Its word that a rank is ready then waits behind what that rank sends, so two ranks take
    turns, which over a network takes twice the time (`python -m experiments.two_hosts`)."""
    own, ranks = dist.get_rank(group), len(going)
    coming[own].copy_(going[own])
    others = [(own + step) % ranks for step in range(1, ranks)]  # each begins with another one
    messages = [
        dist.P2POp(begin, tensors[rank], group=group, group_peer=rank, tag=EXCHANGE_TAG)
        for begin, tensors in ((dist.irecv, coming), (dist.isend, going))
        for rank in others
        if tensors[rank].numel()
    ]
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()


def gather_alike(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks, which have one shape, in rank order: [ranks, …]; no autograd."""
    staged = _must_stage(tensor, group)
    source = tensor.contiguous().cpu() if staged else tensor.contiguous()
    every = source.new_empty((dist.get_world_size(group) * source.shape[0], *source.shape[1:]))
    dist.all_gather_into_tensor(every, source, group=group)
    every = every.to(tensor.device) if staged else every
    return every.view(dist.get_world_size(group), *source.shape)


def sum_scattered(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Of the sum over the group of `rows`, [ranks × n, …], this rank's n; no autograd."""
    staged = _must_stage(rows, group)
    source = rows.contiguous().cpu() if staged else rows.contiguous()
    own = source.new_empty((len(source) // dist.get_world_size(group), *source.shape[1:]))
    dist.reduce_scatter_single(own, source, group=group)
    return own.to(rows.device) if staged else own


def send_to_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The first rank's tensor, on all of them; written into it on the others."""
    if dist.get_world_size(group) == 1:
        return tensor
    staged = tensor.cpu() if _must_stage(tensor, group) else tensor
    dist.broadcast(staged, group=group, group_src=0)
    return tensor if staged is tensor else tensor.copy_(staged)


class AllToAll(torch.autograd.Function):
    """`exchange_rows` with gradients: the backward is the inverse exchange."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return exchange_rows(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange_rows(grad, ctx.receive, ctx.send, ctx.group), None, None, None


class Shift:
    """A tensor being sent to the next rank of a ring, and another one received from the rank before."""

    def __init__(self, tensor: Tensor, shape: Sequence[int], group: dist.ProcessGroup):
        """shape: of what comes. Begins at once; what is sent must not be written to before `wait`."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._device = tensor.device
        staged = _must_stage(tensor, group)
        self._sent = tensor.contiguous().cpu() if staged else tensor.contiguous()
        self._coming = self._sent.new_empty(tuple(shape))
        messages = []
        # What comes is asked for first, for the reason in `_exchange_by_messages`.
        if self._coming.numel():
            messages.append(dist.P2POp(dist.irecv, self._coming, group=group, group_peer=(rank - 1) % ranks))
        if self._sent.numel():
            messages.append(dist.P2POp(dist.isend, self._sent, group=group, group_peer=(rank + 1) % ranks))
        self._works = dist.batch_isend_irecv(messages) if messages else []

    def wait(self) -> Tensor:
        """Wait for what comes, and return it."""
        with span("shift", COLLECTIVE):
            for work in self._works:
                work.wait()
        return self._coming.to(self._device)


def sum_in_place(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of `tensor` over the group, written back into it; no autograd."""
    return _reduce_in_place(tensor, group, dist.ReduceOp.SUM)


def begin_sum(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Begin the sum of `tensor` over the group, written back into it; what to wait for, or None when it is done."""
    if dist.get_world_size(group) == 1:
        return None
    if _must_stage(tensor, group):
        sum_in_place(tensor, group)
        return None
    return dist.all_reduce(tensor, group=group, async_op=True)


def largest_in_place(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Elementwise maximum of `tensor` over the group, written back into it; no autograd."""
    return _reduce_in_place(tensor, group, dist.ReduceOp.MAX)


def _reduce_in_place(tensor: Tensor, group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if dist.get_world_size(group) == 1:
        return tensor
    if _must_stage(tensor, group):
        staged = tensor.cpu()
        dist.all_reduce(staged, operation, group=group)
        return tensor.copy_(staged)
    dist.all_reduce(tensor, operation, group=group)
    return tensor
