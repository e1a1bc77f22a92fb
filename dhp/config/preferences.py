"""Rules of training.preference."""

from dhp.config.ranges import require, require_choice
from dhp.config.schema import Config
from dhp.config.training import PreferenceConfig
from dhp.core.errors import ConfigError

PREFERENCES = ("dpo", "kto", "orpo")  # objectives; those of plugins may read any key
_READ_BY = {  # which objectives read a key of training.preference
    "beta": PREFERENCES,
    "label_smoothing": ("dpo",),
    "liked_weight": ("kto",),
    "disliked_weight": ("kto",),
    "reference": ("dpo", "kto"),
}


def check_preference(config: Config) -> None:
    """Rules of training.preference. Raises ConfigError."""
    asked, key = config.training.preference, "training.preference."
    plain, objective = PreferenceConfig(), config.training.objective
    unread = [
        name
        for name, of in _READ_BY.items()
        if getattr(asked, name) != getattr(plain, name) and objective in ("sft", *PREFERENCES) and objective not in of
    ]
    if unread:
        raise ConfigError(
            f"{key}{unread[0]}={getattr(asked, unread[0])} with training.objective={objective}, which does "
            f"not read it. Of {', '.join(_READ_BY[unread[0]])} it is a setting. Leave it out, set the objective, or "
            "set it in the stage that has that objective"
        )
    require(asked.beta > 0, f"{key}beta", asked.beta, "beta > 0")
    smoothing = asked.label_smoothing
    require(0 <= smoothing < 0.5, f"{key}label_smoothing", smoothing, "0 <= label_smoothing < 0.5")
    for name, value in (("liked_weight", asked.liked_weight), ("disliked_weight", asked.disliked_weight)):
        require(0 <= value < float("inf"), f"{key}{name}", value, f"0 <= {name}, and a number")
    require_choice(f"{key}reference", asked.reference, ("start", "base"))
