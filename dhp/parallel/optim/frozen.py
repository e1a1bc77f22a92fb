"""The optimizer of a stage that is not trained: no gradient, no state. Gradients may pass through to earlier stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dhp.core.state import StateSink, StateSource
from dhp.parallel.optim.base import STEP, Rates, cast_parameters, exact_dtype
from dhp.parallel.tensor.slices import as_dtensors


class Frozen:
    """The methods of `dhp.parallel.optim.base.StageOptimizer`, most of which do nothing.

    passes: gradients go through the stage to earlier ones. Where none do, no activations are saved.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, passes: bool):
        module.requires_grad_(False)
        if dtype != exact_dtype(dtype):
            cast_parameters(module, dtype)
        self._module, self._passes = module, passes
        self._others: str | None = None  # a parameter that another stage saves

    def tie(self, name: str, owns: bool) -> None:
        """The parameter `name` is another stage's too. The owner saves it."""
        self._others = None if owns else name

    def forward(self, compute: Callable[[], Any]) -> Any:
        """Run `compute`, under no_grad where no gradients pass."""
        with torch.set_grad_enabled(self._passes and torch.is_grad_enabled()):
            return compute()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Send gradients through; a micro-batch may have no tensor that requires any."""
        if loss.requires_grad:
            loss.backward()

    def rest(self) -> None:
        """Nothing to free: weights are not gathered."""

    def norm_sq(self) -> float:
        """0: frozen weights do not count."""
        return 0.0

    def gradient_bytes(self) -> int:
        """0: there are no gradients."""
        return 0

    def step(self, rates: Rates, coefficient: float) -> None:
        """Nothing is updated."""

    def drop(self) -> None:
        """There is nothing to drop."""

    def save_weights(self, sink: StateSink) -> None:
        """Hand over the weights, so that a checkpoint is whole."""
        for name, weight in as_dtensors(self._module).items():
            if name != self._others:
                sink.add(name, weight)

    def save_state(self, sink: StateSink) -> None:
        """Hand over that no step was taken."""
        sink.add_once(STEP, torch.tensor(0.0))

    def load_state(self, source: StateSource) -> None:
        """There is none."""
