"""A module whose forward is a given computation; ZeRO-3 and FSDP wrap it.

ZeRO-3 and FSDP gather weights around a module's own forward. A stage's computation takes weights from outside of it
(the loss, the head's), so the computation runs as the forward of the module that holds them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class Computation(nn.Module):
    """`Computation(module)(compute=f)` is `f()`, seen by hooks as a forward of something that has `module` inside."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], Any]) -> Any:
        """The result of `compute`: tensors of its own, even where they are the output of a module inside.

        Hooks on one tensor would run in the order in which they came, a layer's before the root's, and on two tensors
        the other way round: ranks of which one alone adds something behind its last layer would gather weights in
        different orders.
        """
        return tree_map_only(Tensor, _Boundary.apply, compute())


class _Boundary(torch.autograd.Function):
    """A tensor with the values and the memory of another one, which autograd does not take for a view of it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
