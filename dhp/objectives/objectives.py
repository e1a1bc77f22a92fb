"""The objectives that there are, by name."""

from dhp.config.training import PreferenceConfig
from dhp.core.errors import ConfigError
from dhp.core.kinds import takes
from dhp.core.text import did_you_mean, nearest
from dhp.objectives.objective import CrossEntropy, Objective
from dhp.objectives.preferences import Dpo, Kto, Orpo

OBJECTIVES: dict[str, type[Objective]] = {"sft": CrossEntropy, "dpo": Dpo, "kto": Kto, "orpo": Orpo}
takes("training.objective", OBJECTIVES)


def find_objective(name: str, settings: PreferenceConfig | None = None) -> Objective:
    """The objective of that name. settings: of objectives of preferences. Raises ConfigError where there is none."""
    if name not in OBJECTIVES:
        raise ConfigError(
            f"training.objective={name} does not exist. Set one of {', '.join(OBJECTIVES)}, or name the module that "
            f"registers it in plugins{did_you_mean([nearest(name, list(OBJECTIVES))])}"
        )
    return OBJECTIVES[name](settings)
