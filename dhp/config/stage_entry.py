"""The section of a configuration about one of several training stages."""

from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass
class StageEntry:
    """One of several training stages."""

    recipe: Optional[str] = None
    """Settings to begin with: a file of configs/stage. Null: the one of the stage's own name, where there is one."""

    settings: dict[str, Any] = field(default_factory=dict)
    """What differs from them, by section, as {training: {max_steps: 40}}."""

    rope_theta: Optional[float] = None
    """Base of the decoder's rotary positions from this stage on. Null: as the model has it."""

    max_positions: Optional[int] = None
    """Longest row that the decoder knows from this stage on, in positions. Null: as the model has it."""
