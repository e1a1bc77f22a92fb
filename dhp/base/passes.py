"""What a step computes of a part of which not all is trained: shares, which cross processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Products:
    """Products of states with some of a part's matrices, as shares of what one forward takes without adapters.

    forward: what forward takes: above 1 with adapters. inputs: what gradients of the states take; weights: of the
    matrices.
    """

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0


@dataclass(frozen=True)
class Passes:
    """Of a part: the matrices before its layers, those of its layers, and those behind, the projector or the head.

    attention: the share of the layers' attention that gradients go through.
    """

    entering: Products = Products()
    layers: Products = Products()
    ending: Products = Products()
    attention: float = 1.0


EVERYTHING = Passes()  # all is trained
_AHEAD = Products(inputs=0.0, weights=0.0)
NO_BACKWARD = Passes(_AHEAD, _AHEAD, _AHEAD, 0.0)
