"""One rank's partitions under ZeRO: which elements of which parameters, their gradients, the optimizer's copy of them.

DeepSpeed keeps it in three ways, one for each of its optimizers; here they have one interface. All of its private
attributes that dhp reads are named in this file, and tests/parallel/optim/test_zero_canaries.py checks each
against the pinned version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Range(NamedTuple):
    """Consecutive elements of a parameter that are in this rank's partition: `count` of them, from `start` on in the
    parameter and from `here` on in the partition."""

    name: str
    shape: tuple[int, ...]
    start: int
    here: int
    count: int


class Partitions(ABC):
    """This rank's share of one DeepSpeed optimizer. names: of the parameters, by id."""

    divides = 1  # what the engine divides gradients by, so that they must be multiplied by it

    def __init__(self, optimizer: Any, names: Mapping[int, str]):
        self._optimizer, self._names = optimizer, names

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside, which holds the moments of each tensor of `masters`."""
        return self._optimizer.optimizer

    def masters(self) -> Iterator[tuple[Tensor, list[Range]]]:
        """The optimizer's flat float32 weights, and which elements of which parameters they are."""
        for group, weights in enumerate(self._flat_masters()):
            yield weights, list(self._ranges(group, weights.numel()))

    def gradients(self) -> list[Tensor]:
        """The step's reduced gradients of this rank's elements, in any cut; padding is zero."""
        return [gradient for group in self._group_gradients() for gradient in group]

    def gradients_by_name(self) -> Iterator[tuple[Range, int, Tensor]]:
        """The same by parameter: a range, how far into it the elements begin, and the elements, flat, to read or to
        write to."""
        for gradients, (_, ranges) in zip(self._group_gradients(), self.masters(), strict=True):
            begins = list(accumulate((gradient.numel() for gradient in gradients), initial=0))
            for own in ranges:
                for gradient, begin in zip(gradients, begins):
                    first, last = max(own.here, begin), min(own.here + own.count, begin + gradient.numel())
                    if first < last:
                        yield own, first - own.here, gradient.view(-1)[first - begin : last - begin]

    @abstractmethod
    def spread(self) -> None:
        """Give the module the weights of `masters`. All ranks together."""

    @abstractmethod
    def drop(self) -> None:
        """Forget the step's gradients."""

    def leftovers(self) -> list[Tensor]:
        """Gradients that a step leaves behind, to be zeroed before the next one sees them."""
        return []

    @abstractmethod
    def _group_gradients(self) -> list[list[Tensor]]:
        """The gradients that make up each flat tensor of `masters`, one after another."""

    @abstractmethod
    def _flat_masters(self) -> Sequence[Tensor]: ...

    @abstractmethod
    def _ranges(self, group: int, size: int) -> Iterator[Range]: ...

    def _cut(self, parameters: Sequence[nn.Parameter], offsets: Sequence[int], size: int) -> Iterator[Range]:
        """Ranges of parameters that follow one another in a flat tensor, of which ranks hold `size` each."""
        begin = size * dist.get_rank()
        for parameter, offset in zip(parameters, offsets, strict=True):
            first, last = max(begin, offset), min(begin + size, offset + parameter.numel())
            if first < last:
                name, shape = self._names[id(parameter)], tuple(parameter.shape)
                yield Range(name, shape, first - offset, first - begin, last - first)


class FlatPartitions(Partitions):
    """Stages 1 and 2 of `DeepSpeedZeroOptimizer`: all parameters of a group in one flat tensor, cut in equal parts."""

    def _group_gradients(self) -> list[list[Tensor]]:
        kept = self._optimizer.averaged_gradients
        return [list(kept[group]) for group in range(len(self._flat_masters()))]

    def spread(self) -> None:
        self._optimizer.update_lp_params()

    def drop(self) -> None:
        self._optimizer.zero_grad()
        # Gradients in another format than the module's are added to what is there.
        for kept in (self._optimizer.averaged_gradients, self._optimizer.all_grad_tensors):
            kept.update(dict.fromkeys(kept))

    def _flat_masters(self) -> Sequence[Tensor]:
        return self._optimizer.single_partition_of_fp32_groups

    def _ranges(self, group: int, size: int) -> Iterator[Range]:
        inner = self._optimizer
        return self._cut(inner.round_robin_bit16_groups[group], inner.round_robin_bit16_offsets[group], size)


class Bf16Partitions(Partitions):
    """Stage 1 in 16 bits, `BF16_Optimizer`: cut as above, but each rank accumulates the gradients of all elements."""

    def _group_gradients(self) -> list[list[Tensor]]:
        return [[gradient] for gradient in self._optimizer.fp32_groups_gradient_flat_partition]

    def spread(self) -> None:
        self._optimizer.update_lp_params()

    def drop(self) -> None:
        self._optimizer.zero_grad()

    def _flat_masters(self) -> Sequence[Tensor]:
        return self._optimizer.fp32_groups_flat_partition

    def _ranges(self, group: int, size: int) -> Iterator[Range]:
        parameters = self._optimizer.bf16_groups[group]
        ends = torch.tensor([0, *(parameter.numel() for parameter in parameters)]).cumsum(0).tolist()
        return self._cut(parameters, ends[:-1], size)


class ScatteredPartitions(Partitions):
    """Stage 3, `DeepSpeedZeroOptimizer_Stage3`: each parameter cut in equal parts, a rank's parts in a flat tensor."""

    def __init__(self, optimizer: Any, names: Mapping[int, str]):
        super().__init__(optimizer, names)
        self.divides = dist.get_world_size()

    def _group_gradients(self) -> list[list[Tensor]]:
        sizes = [weights.numel() for weights in self._flat_masters()]
        return [[gradient] for gradient in self._optimizer.grad_partitions_flat_buffer.split(sizes)]

    def weights(self) -> Iterator[tuple[Tensor, list[Range]]]:
        """As `masters`, in the module's own format: what parameters are gathered from."""
        for group, weights in enumerate(self._optimizer.fp16_partitioned_groups_flat):
            yield weights, list(self._ranges(group, weights.numel()))

    def spread(self) -> None:
        for group in range(len(self._flat_masters())):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(group)

    def drop(self) -> None:
        self._optimizer.zero_grad()
        self._optimizer.averaged_gradients = {}

    def leftovers(self) -> list[Tensor]:
        # A parameter that the next step does not use would be updated with this step's gradient.
        return [self._optimizer.grad_partitions_flat_buffer]

    def _flat_masters(self) -> Sequence[Tensor]:
        return self._optimizer.fp32_partitioned_groups_flat

    def _ranges(self, group: int, size: int) -> Iterator[Range]:
        here = 0
        for parameter in self._optimizer.fp16_groups[group]:
            held = parameter.partition_numel()
            start = held * dist.get_rank()
            count = min(held, parameter.ds_numel - start)
            if count > 0:
                yield Range(self._names[id(parameter)], tuple(parameter.ds_shape), start, here, count)
            here += held


def partitions_of(optimizer: Any, names: Mapping[int, str]) -> Partitions:
    """The partitions of this DeepSpeed optimizer."""
    kinds = {
        "DeepSpeedZeroOptimizer": FlatPartitions,
        "BF16_Optimizer": Bf16Partitions,
        "DeepSpeedZeroOptimizer_Stage3": ScatteredPartitions,
    }
    return kinds[type(optimizer).__name__](optimizer, names)
