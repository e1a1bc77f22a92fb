"""From local gradients to an optimizer step when every rank of the group keeps the whole of what it holds.

The same verbs as `dhp.parallel.zero.ZeroSharded`, so that a trainer does not care which one it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dhp.parallel.collectives import sum_in_place
from dhp.parallel.state import MOMENTS, STEP, StateSink, StateSource, steps_taken
from dhp.parallel.tensor import partial_parameters

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
BUCKET_BYTES = 32 << 20


class Replicated:
    """Gradients summed over `group`; parameters that are DTensors are sharded over their own mesh beside it."""

    def __init__(self, module: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup):
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._names, self._parameters = [name for name, _ in named], [p for _, p in named]
        # The optimizer works element by element, so it sees plain local shards that share the parameters' memory:
        # torch's fused loops refuse a mixture of DTensors and tensors.
        self._locals = [_local_alias(p) for p in self._parameters]
        self.optimizer = make_optimizer(self._locals)
        self._group = group
        self._partial = {id(parameter): over for parameter, over in partial_parameters(module)}

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate gradients; with `last`, the step's final micro-batch, sum them over the group."""
        loss.backward()
        if last:
            self.reduce()

    def reduce(self) -> None:
        """Sum the accumulated gradients over the group, in buckets, and lay them beside the local parameters."""
        for parameter, local in zip(self._parameters, self._locals, strict=True):
            local.grad = _local_gradient(parameter)
            if id(parameter) in self._partial:
                sum_in_place(local.grad, self._partial[id(parameter)])
        for bucket in _buckets([local.grad for local in self._locals]):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            sum_in_place(flat, self._group)
            for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def norm_sq(self) -> float:
        """Squared L2 norm of the whole part's gradient, the same on every rank."""
        replicated, sharded = [], []
        for parameter, local in zip(self._parameters, self._locals, strict=True):
            (sharded if _mesh_of(parameter) is not None else replicated).append(local.grad)
        total = _squares(replicated)
        if sharded:
            mesh = next(m for m in map(_mesh_of, self._parameters) if m is not None)
            total = total + sum_in_place(_squares(sharded), mesh.get_group())
        return float(total)

    def step(self, lr: float, coefficient: float) -> None:
        """Scale the gradients by `coefficient`, take one optimizer step at `lr`, drop the gradients."""
        gradients = [local.grad for local in self._locals]
        if coefficient != 1.0:
            torch._foreach_mul_(gradients, coefficient)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.drop()

    def drop(self) -> None:
        """Forget the step's gradients."""
        for parameter, local in zip(self._parameters, self._locals, strict=True):
            parameter.grad = local.grad = None

    def save_state(self, sink: StateSink) -> None:
        """Hand over the optimizer's state. Ranks that share parameters by slices call it together."""
        sink.add(STEP, steps_taken(self.optimizer))
        for name, parameter, local in zip(self._names, self._parameters, self._locals, strict=True):
            state = self.optimizer.state.get(local, {})
            for kind in MOMENTS if state else ():
                sink.add(f"{name}.{kind}", _laid_out_as(parameter, state[kind]))

    def load_state(self, source: StateSource) -> None:
        """Take back what `save_state` handed over."""
        step = source.whole(STEP)
        if not step:
            return
        state = {
            index: {STEP: step.clone()} | {kind: source.like(f"{name}.{kind}", parameter) for kind in MOMENTS}
            for index, (name, parameter) in enumerate(zip(self._names, self._parameters, strict=True))
        }
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})


def _local_alias(parameter: nn.Parameter) -> nn.Parameter:
    local = parameter.detach()
    return nn.Parameter(local.to_local() if isinstance(local, DTensor) else local)


def _laid_out_as(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """This rank's values of something that is sharded as the parameter is."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if isinstance(parameter, DTensor):
        if gradient is None:
            return torch.zeros_like(parameter.to_local())
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        return gradient.to_local().contiguous()
    return torch.zeros_like(parameter) if gradient is None else gradient


def _mesh_of(parameter: nn.Parameter) -> torch.distributed.device_mesh.DeviceMesh | None:
    """The mesh over which a parameter's elements differ between ranks, or None when all hold the same."""
    # Not `is_shard`, which denies the interleaved slices of fused weights (`_StridedShard`).
    if isinstance(parameter, DTensor) and not all(placement.is_replicate() for placement in parameter.placements):
        return parameter.device_mesh
    return None


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(list(tensors))).double()
    return (norms * norms).sum()


def _buckets(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
