"""Where a rank is. A module of its own, so that who asks needs no Ray."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankDevice:
    """A rank's device: the number of its logical device, and that of its node."""

    device: int
    node: int
