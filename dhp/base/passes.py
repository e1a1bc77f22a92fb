"""The share of a part's matrix products that a step computes when not all of it is trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MatmulShare:
    """Products of states with some of a part's matrices, as shares of what one forward takes without adapters.

    forward: what forward takes: above 1 with adapters. inputs: what gradients of the states take; weights: of the
    matrices.
    """

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0


@dataclass(frozen=True)
class TrainedShare:
    """Shares of a part: of the matrices before its layers, of those in them, and of those after, projector or head.

    attention: the share of the layers' attention that gradients go through.
    """

    entering: MatmulShare = MatmulShare()
    layers: MatmulShare = MatmulShare()
    ending: MatmulShare = MatmulShare()
    attention: float = 1.0


EVERYTHING = TrainedShare()  # all is trained
_AHEAD = MatmulShare(inputs=0.0, weights=0.0)
NO_BACKWARD = TrainedShare(_AHEAD, _AHEAD, _AHEAD, 0.0)
