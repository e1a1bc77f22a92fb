"""A module whose forward is whatever computation it is given: what sharded states wrap.

ZeRO-3 and FSDP gather weights around a module's own forward. A part's computation takes weights from outside of it (the
loss, the head's), so the computation runs as the forward of the module that holds them all.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Computation(nn.Module):
    """`Computation(module)(compute=f)` is `f()`, seen by hooks as a forward of something that has `module` inside."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        """The tensor that `compute` makes of the module."""
        return compute()
