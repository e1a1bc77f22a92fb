"""References to values that another actor holds: the process that needs one fetches it from there."""

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
