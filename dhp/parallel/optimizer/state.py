"""Saving and loading of an optimizer's state: named tensors, each with its extent.

Each moment goes by its parameter's name, `<parameter>.exp_avg`; where a rank holds a range of a parameter's elements,
the range says which. So the names and extents tell what belongs where for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state of a parameter besides its step count
MASTER = "master"  # the optimizer's own copy of a weight
STEP = "step"  # optimizer steps taken; parameters of a part step together


class StateSink(Protocol):
    """Takes the state to save: `dhp.checkpoint.shards.ShardWriter`, which parallel does not import."""

    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor that all ranks of the stage hold alike, or a DTensor, of which each holds its slice."""

    def add_once(self, name: str, tensor: Tensor) -> None:
        """A tensor that all ranks of the part hold alike, in whichever stage."""

    def add_flat(self, name: str, elements: Tensor, start: int, shape: tuple[int, ...]) -> None:
        """A range of the elements of a tensor of `shape`."""

    def add_block(self, name: str, block: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
        """A block of a tensor of `shape` that begins at `offset` in it. A rank may hold several of one tensor."""


class StateSource(Protocol):
    """Returns saved state: `dhp.checkpoint.shards.ShardReader`."""

    def whole(self, name: str) -> Tensor:
        """All of a tensor."""

    def like(self, name: str, held: Tensor) -> Tensor:
        """This rank's share of a tensor laid out as `held`."""

    def flat(self, name: str, start: int, count: int) -> Tensor:
        """A range of a tensor's elements."""

    def block(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The block of a tensor that begins at `offset` and has `shape`."""


def step_for(optimizer: torch.optim.Optimizer, weight: Tensor, step: Tensor) -> Tensor:
    """The state's count of `step`s for `weight`: on its device where the optimizer is fused, else on the host, as torch
    has it."""
    device = weight.device if optimizer.defaults.get("fused") else torch.device("cpu")
    return step.to(device, torch.float32, copy=True)


def steps_taken(optimizer: torch.optim.Optimizer) -> Tensor:
    """The number of steps that the optimizer took, a scalar; 0 before its first."""
    states: list[Mapping[str, Any]] = list(optimizer.state.values())
    return states[0][STEP].detach().clone() if states else torch.tensor(0.0)
