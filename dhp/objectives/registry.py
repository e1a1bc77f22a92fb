"""The objectives by the name that training.objective has. One more is a file beside this one and a line here, or a
module of a user's own, which `plugins` names and which adds its line to `OBJECTIVES` when it is imported."""

from __future__ import annotations

from dhp.config.suggestions import did_you_mean, nearest
from dhp.core.errors import ConfigError
from dhp.core.plugins import takes
from dhp.objectives.cross_entropy import CrossEntropy
from dhp.objectives.objective import Objective

OBJECTIVES: dict[str, type[Objective]] = {"sft": CrossEntropy}
takes("training.objective", OBJECTIVES)


def find_objective(name: str) -> Objective:
    """The objective of that name. Raises ConfigError where there is none."""
    if name not in OBJECTIVES:
        raise ConfigError(
            f"training.objective={name} does not exist. Set one of {', '.join(OBJECTIVES)}, or name the module that "
            f"registers it in plugins{did_you_mean([nearest(name, list(OBJECTIVES))])}"
        )
    return OBJECTIVES[name]()
