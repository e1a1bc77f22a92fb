"""Losses that are no numbers: their step is left out on every rank of every part."""

from __future__ import annotations

from torch import Tensor


def breaking(loss: Tensor) -> Tensor:
    """The loss. Where it is infinite or not a number, so are all gradients that go back from it.

    A loss may be broken though its gradients are not. The norm of all gradients, which every rank of every part knows,
    then shows it to all of them, without a message of its own and without a look at the loss, which a GPU would wait
    for. A finite loss is multiplied by 1: value and gradients keep their bits.
    """
    return loss * (1.0 + 0.0 * loss.detach())
