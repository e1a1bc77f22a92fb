"""Lets tokens visit experts evenly on null CUDA, where no kernel counts visits."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class _Numbers:
    """What the host reads of visits: it waits as it would, and reads equal numbers."""

    def __init__(self, counted: Tensor, visits: int) -> None:
        self._counted, self._visits = counted, visits

    def tolist(self) -> list[list[list[int]]]:
        """Of those that go and of those that come, by rank and expert."""
        self._counted.tolist()
        _, ranks, experts = self._counted.shape
        each, more = divmod(self._visits, ranks * experts)
        counts = [each + (place < more) for place in range(ranks * experts)]
        return [[counts[rank * experts : (rank + 1) * experts] for rank in range(ranks)]] * 2


class _Torch(ModuleType):
    """torch, for a module that stacks numbers of visits to read them."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.visits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def stack(self, tensors: list[Tensor], *more: Any) -> Any:
        return _Numbers(torch.stack(tensors, *more), self.visits)


def make_even(module: Any) -> None:
    """module: dhp.parallel.expert.expert_shares, just imported."""
    count, stand_in = module.count_visits, _Torch()

    def count_visits(pairs: Tensor, experts: int) -> Tensor:
        stand_in.visits = len(pairs)
        return count(pairs, experts)

    module.count_visits, module.torch = count_visits, stand_in
