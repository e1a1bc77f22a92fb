"""A step's gradients on one rank: summed over micro-batches and ranks, in buckets, while backward still runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhp.core.tracing import COLLECTIVE, span
from dhp.parallel.comm import begin_sum, sum_in_place

BUCKET_BYTES = 32 << 20


class _Bucket:
    """Consecutive parameters whose gradients are summed over the ranks in one message."""

    def __init__(self, over: dist.ProcessGroup | None, group: dist.ProcessGroup | None):
        """over: further ranks of a sum. group: those of it; None: all replicas."""
        self.over, self.group = over, group
        self.members: list[int] = []
        self.sizes: list[int] = []
        self.flat: Tensor | None = None
        self.begun: dist.Work | None = None

    def open(self, shapes: Sequence[torch.Size], like: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Take memory for the gradients, not yet written: each member and its gradient's slice of it."""
        self.flat = like.new_empty(sum(self.sizes), dtype=dtype)
        self.missing = len(self.members)
        for member, shape, own in zip(self.members, shapes, self.flat.split(list(self.sizes)), strict=True):
            yield member, own.view(shape)


class Gradients:
    """Sums of the gradients of `parameters`, in `dtype`, over micro-batches and over the ranks of `group`.

    partial: by a parameter's id, further ranks over which its gradients are summed. others: by a parameter's id, the
    ranks over which they are summed in the place of `group`.

    overlap: the sum of a bucket over the ranks begins as soon as its last gradient is there, not when all are.

    exclusive: no computation after backward begins before the sums are done. Ranks of two parts that share GPUs need
    it: a sum needs all GPUs at once, and spins on those that have come to it while the other part computes on the rest.

    With one rank and parameters in `dtype`, gradients stay where autograd accumulates them and nothing is copied.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        partial_over: Mapping[int, dist.ProcessGroup],
        overlap: bool = True,
        exclusive: bool = False,
        others: Mapping[int, dist.ProcessGroup] = MappingProxyType({}),
    ):
        self._parameters, self._dtype, self._group = parameters, dtype, group
        self._partial, self._overlap, self._exclusive = partial_over, overlap, exclusive
        self._sums: list[Tensor] | None = None
        self._reducing = self._unfinished = False
        self._direct = dist.get_world_size(group) == 1 and all(p.dtype == dtype for p in parameters)
        if not self._direct:
            self._buckets, self._bucket_of = _cut_into_buckets(parameters, dtype, partial_over, others)
            for index, parameter in enumerate(parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._take, index))

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate the gradients of `loss`; with `last`, begin to sum what has accumulated over the ranks."""
        if not self._direct and self._sums is None:
            self._open()
        self._reducing = last and self._overlap
        loss.backward()
        if last:
            self._begin_all()
            if self._exclusive:
                self._finish()

    def local(self) -> list[Tensor]:
        """The summed gradient of each parameter; zero where there is none.

        Waits for the sums. `backward` does not: what it hands to the other part need not wait for them.
        """
        self._finish()
        return self._sums

    def nbytes(self) -> int:
        """Memory that the step's gradients take."""
        if self._direct:
            found = [_gradient_of(parameter) for parameter in self._parameters if parameter.grad is not None]
        else:
            found = [bucket.flat for bucket in self._buckets if bucket.flat is not None]
        return sum(gradient.nbytes for gradient in found)

    def drop(self) -> None:
        """Forget the step's gradients, and give their memory back."""
        self._finish()
        self._sums = None
        for parameter in self._parameters:
            parameter.grad = None
        for bucket in () if self._direct else self._buckets:
            bucket.flat = bucket.begun = None

    def _open(self) -> None:
        shapes = [parameter.shape for parameter in self._parameters]
        slices: dict[int, Tensor] = {}
        for bucket in self._buckets:
            like = self._parameters[bucket.members[0]].detach()
            slices |= bucket.open([shapes[m] for m in bucket.members], like, self._dtype)
        self._sums = [slices[index] for index in range(len(self._parameters))]
        self._unwritten = set(range(len(self._parameters)))
        self._next = 0

    def _take(self, index: int, parameter: nn.Parameter) -> None:
        """Called when autograd has finished a parameter's gradient: add it to its sum, and drop it."""
        if index in self._unwritten:  # zeros to add it to would be written and read for nothing
            self._unwritten.remove(index)
            self._sums[index].copy_(_gradient_of(parameter))
        else:
            self._sums[index] += _gradient_of(parameter)
        parameter.grad = None
        if self._reducing:
            self._buckets[self._bucket_of[index]].missing -= 1
            self._begin_ready()

    def _begin_ready(self) -> None:
        """Begin the sums of full buckets, in the order of the buckets: all ranks must send the same one next."""
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._begin(self._buckets[self._next])
            self._next += 1

    def _begin(self, bucket: _Bucket) -> None:
        for index in self._unwritten.intersection(bucket.members):
            self._unwritten.remove(index)
            self._sums[index].zero_()
        if bucket.over is not None:
            sum_in_place(bucket.flat, bucket.over)
        bucket.begun = begin_sum(bucket.flat, self._group if bucket.group is None else bucket.group)

    def _begin_all(self) -> None:
        """Begin the sums that need no other sum before them."""
        self._reducing, self._unfinished = False, True
        if not self._direct:
            while self._next < len(self._buckets) and self._buckets[self._next].over is None:
                self._begin(self._buckets[self._next])
                self._next += 1

    def _finish(self) -> None:
        if not self._unfinished:
            return
        self._unfinished = False
        if self._direct:
            self._sums = [_gradient_of(parameter) for parameter in self._parameters]
            for parameter, part in zip(self._parameters, self._sums, strict=True):
                if id(parameter) in self._partial:
                    sum_in_place(part, self._partial[id(parameter)])
            return
        with span("sums of gradients", COLLECTIVE):
            for bucket in self._buckets[self._next :]:
                self._begin(bucket)
            for bucket in self._buckets:
                if bucket.begun is not None:
                    bucket.begun.wait()


def _cut_into_buckets(
    parameters: Sequence[nn.Parameter],
    dtype: torch.dtype,
    partial_over: Mapping[int, dist.ProcessGroup],
    others: Mapping[int, dist.ProcessGroup],
) -> tuple[list[_Bucket], dict[int, int]]:
    """Buckets in the order of backward, each with one kind of sum, and the bucket of each parameter.

    Those with a sum over further ranks come last, where waiting for it holds nothing up; a bucket comes where its last
    member does.
    """
    order = sorted(reversed(range(len(parameters))), key=lambda index: id(parameters[index]) in partial_over)
    last: dict[_Bucket, int] = {}  # by bucket, the place of its last member
    filling: dict[tuple[int, int], _Bucket] = {}  # by kind of sum
    for place, index in enumerate(order):
        over, group = partial_over.get(id(parameters[index])), others.get(id(parameters[index]))
        size = parameters[index].numel()
        bucket = filling.get((id(over), id(group)))
        if bucket is None or (sum(bucket.sizes) + size) * dtype.itemsize > BUCKET_BYTES:
            bucket = filling[id(over), id(group)] = _Bucket(over, group)
        bucket.members.append(index)
        bucket.sizes.append(size)
        last[bucket] = place
    buckets = sorted(last, key=last.__getitem__)
    return buckets, {index: at for at, bucket in enumerate(buckets) for index in bucket.members}


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
