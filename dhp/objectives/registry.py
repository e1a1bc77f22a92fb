"""The objectives by the name that training.objective has. One more is a file beside this one and a line here."""

from __future__ import annotations

from dhp.config.suggestions import did_you_mean, nearest
from dhp.core.errors import ConfigError
from dhp.objectives.cross_entropy import CrossEntropy
from dhp.objectives.objective import Objective

OBJECTIVES: dict[str, type[Objective]] = {"sft": CrossEntropy}


def find_objective(name: str) -> Objective:
    """The objective of that name. Raises ConfigError where there is none."""
    if name not in OBJECTIVES:
        raise ConfigError(
            f"training.objective={name} does not exist. Set one of {', '.join(OBJECTIVES)}"
            f"{did_you_mean([nearest(name, list(OBJECTIVES))])}"
        )
    return OBJECTIVES[name]()
