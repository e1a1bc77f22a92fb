"""A value that an actor names instead of holding it: another one made it, and whoever needs it gets it from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray


@dataclass(frozen=True)
class RemoteValue:
    """ref: of the value, which is there."""

    ref: Any

    def fetch(self) -> Any:
        """The value. Raises what Ray does where it is lost."""
        return ray.get(self.ref)
