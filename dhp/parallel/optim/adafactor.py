"""Adafactor: factored mean squares (Shazeer and Stern 2018).

As transformers' Trainer has it (`optim: adafactor`): no momentum, and steps of the learning rate's size. Averages over
rows and columns are vectors, whole on every rank; of a weight that is cut, each step sums what the ranks hold of its
rows, of its columns and of its update's size, all weights in one message each."""

from collections.abc import Callable, Iterable, Sequence
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from dhp.core.parameters import FACTORS, MOMENTS, ParameterGroup
from dhp.core.torch_private import scale_each
from dhp.parallel.comm import sum_in_place
from dhp.parallel.optim.base import STEP, group_parameters
from dhp.parallel.optim.value_ranges import Place, PlacedOptimizer

ROW, COLUMN = FACTORS
SQUARE = MOMENTS[1]  # of a weight without rows
DECAY = -0.8  # of step number t, 1 - t ** DECAY is what is kept of the averages
LEAST = 1e-30  # added to squares
LARGEST = 1.0  # root mean square of an update; larger ones are scaled to it


class Adafactor(PlacedOptimizer):
    """transformers' Adafactor with relative_step=False and scale_parameter=False, of whole weights or parts of them."""

    def __init__(self, groups: Sequence[dict[str, Any]]):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every weight that has a gradient, times `coefficient`; all ranks that share weights together. There is
        no closure."""
        taken = [(w, group) for group in self.param_groups for w in group["params"] if w.grad is not None]
        weights = [weight for weight, _ in taken]
        if self.coefficient != 1.0 and taken:
            scale_each([weight.grad for weight in weights], self.coefficient)
        for weight in weights:
            state = self.state[weight]
            if len(state) < 2:
                state |= {STEP: torch.tensor(0.0), **self.new_states(weight)}
            state[STEP] += 1
        for weight, squares in zip(weights, self._sums(weights), strict=True):
            self._average(weight, squares)
        for (weight, group), size in zip(taken, self._sizes(weights), strict=True):
            update = self._update_of(weight).mul_(group["lr"] / max(1.0, size / LARGEST))
            weight.add_(weight, alpha=-group["weight_decay"] * group["lr"]).sub_(update)

    def new_states(self, weight: Tensor) -> dict[str, Tensor]:
        """As `PlacedOptimizer.new_states`."""
        if weight.ndim < 2:
            return {SQUARE: torch.zeros_like(weight)}
        whole = self._place(weight).whole
        return {ROW: weight.new_zeros(whole[:-1]), COLUMN: weight.new_zeros((*whole[:-2], whole[-1]))}

    def _place(self, weight: Tensor) -> Place:
        if weight in self.shared:
            return self.shared[weight].place
        return Place(tuple(weight.shape), tuple(slice(0, length) for length in weight.shape))

    def _sums(self, weights: Sequence[Tensor]) -> list[list[Tensor]]:
        """Of each weight the sums of squared gradients over each whole row and each whole column; none without rows."""
        found = [self._own_sums(weight) for weight in weights]
        for ranks, numbers in self.by_ranks(weights).items():
            held = [one for number in numbers for one in found[number]]
            if held:
                flat = sum_in_place(torch.cat([one.flatten() for one in held]), ranks)
                for one, summed in zip(held, flat.split([one.numel() for one in held]), strict=True):
                    one.copy_(summed.view(one.shape))
        return found

    def _own_sums(self, weight: Tensor) -> list[Tensor]:
        if weight.ndim < 2:
            return []
        squares, place = weight.grad.square() + LEAST, self._place(weight)
        row, column = self.new_states(weight).values()
        row[place.numbers[:-1]] = squares.sum(-1)
        column[(*place.numbers[:-2], place.numbers[-1])] = squares.sum(-2)
        return [row, column]

    def _average(self, weight: Tensor, sums: Sequence[Tensor]) -> None:
        state, whole = self.state[weight], self._place(weight).whole
        kinds: tuple[str, ...] = FACTORS if sums else (SQUARE,)
        means = [sums[0] / whole[-1], sums[1] / whole[-2]] if sums else [weight.grad.square() + LEAST]
        fresh = float(state[STEP]) ** DECAY
        for kind, mean in zip(kinds, means, strict=True):
            state[kind].mul_(1 - fresh).add_(mean, alpha=fresh)

    def _update_of(self, weight: Tensor) -> Tensor:
        """What a step moves this rank's part of a weight by, before it is scaled."""
        state, numbers = self.state[weight], self._place(weight).numbers
        if SQUARE in state:
            return state[SQUARE].rsqrt() * weight.grad
        row = (state[ROW] / state[ROW].mean(-1, keepdim=True)).rsqrt()[numbers[:-1]]
        column = state[COLUMN][(*numbers[:-2], numbers[-1])].rsqrt()
        return row.unsqueeze(-1) * column.unsqueeze(-2) * weight.grad

    def _sizes(self, weights: Sequence[Tensor]) -> list[float]:
        """The root mean square of each whole weight's update. It is made again where it is taken: all updates at once
        would be as large as a moment."""
        if not weights:
            return []
        squares = torch.stack([self._update_of(weight).norm().double().square() for weight in weights])
        for ranks, numbers in self.by_ranks(weights).items():
            squares[numbers] = sum_in_place(squares[numbers], ranks)
        counts = [prod(self._place(weight).whole) for weight in weights]
        return [sqrt(total / count) for total, count in zip(squares.tolist(), counts, strict=True)]


def make_adafactor(named: Iterable[tuple[str, nn.Parameter]], group: Callable[[str], ParameterGroup]) -> Adafactor:
    """The optimizer of named parameters, those of each `group` in a group of it, which keeps its name."""
    return Adafactor(group_parameters(named, group))
