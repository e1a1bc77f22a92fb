"""The interface of a stage's optimizer, however states are sharded: replicated, ZeRO, FSDP2, frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from dhp.parallel.optimizer.clipped_step import Rates
from dhp.parallel.optimizer.state import StateSink, StateSource


class StageOptimizer(Protocol):
    """Gradients of a stage's weights, from each micro-batch's backward to the step that uses them up."""

    def forward(self, compute: Callable[[], Any]) -> Any:
        """Run `compute`, which uses the module, where the weights are whole; its tensors."""

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate the gradients of a scalar; with `last`, the step's final one, sum them over the ranks."""

    def rest(self) -> None:
        """No backward follows the forwards so far: free weights that were gathered for one."""

    def norm_sq(self) -> float:
        """Squared L2 norm of the stage's whole gradient, the same on every rank."""

    def gradient_bytes(self) -> int:
        """Bytes of the step's gradients now, beyond what is there between steps."""

    def step(self, rates: Rates, coefficient: float) -> None:
        """Scale the gradients by `coefficient`, take one optimizer step at `rates`, drop the gradients."""

    def drop(self) -> None:
        """Forget the step's gradients."""

    def save_weights(self, sink: StateSink) -> None:
        """Hand over the weights as the module has them."""

    def save_state(self, sink: StateSink) -> None:
        """Hand over the optimizer's state."""

    def load_state(self, source: StateSource) -> None:
        """Take back what `save_state` handed over."""


class TiedOptimizer(StageOptimizer, Protocol):
    """An optimizer that can share a weight with another stage's, rank by rank."""

    def tie(self, name: str, owns: bool) -> None:
        """The parameter `name` is another stage's too. The owner counts it in the norm and saves it."""

    def tied_gradient(self) -> Tensor:
        """This rank's share of the summed gradient of the tied weight, before the other's is added."""

    def add_tied(self, gradient: Tensor) -> None:
        """Add the other stage's share."""
