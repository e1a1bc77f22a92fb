"""The rows of a micro-batch that is traced without weights (`dhp.engine.traced`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TracedRows:
    """A micro-batch as one rank sees it. tokens: of the row; features: rows of the tower among them; targets: tokens
    with a loss; patches: of the tower's one picture; windows: attention windows of equal size that it has."""

    tokens: int
    features: int = 0
    targets: int = 1
    patches: int = 0
    windows: int = 1
