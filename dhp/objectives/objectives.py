"""The objectives that there are, by name."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import Signature, signature
from types import MappingProxyType
from typing import Any

from dhp.config.training import PreferenceConfig
from dhp.core.errors import ConfigError
from dhp.core.kinds import takes
from dhp.core.text import did_you_mean, nearest
from dhp.objectives.log_probabilities import (
    ENTROPIES,
    WEIGHTS,
    LogProbabilityObjective,
    TokenCost,
    TokenLoss,
    cross_entropy,
    importance_sampling,
    linear,
    ppo,
)
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


LOSSES: dict[str, tuple[TokenCost, tuple[str, ...]]] = {  # of someone's own loop, and the columns that they read
    "cross_entropy": (cross_entropy, ()),
    "importance_sampling": (importance_sampling, ("old_logps", "advantages")),
    "ppo": (ppo, ("old_logps", "advantages")),
    "linear": (linear, ("entropy_weights",)),
}
_READ = {WEIGHTS, "reference", *(column for _, columns in LOSSES.values() for column in columns)}  # by any of them


def find_loss(
    loss: str | TokenCost, settings: Mapping[str, Any], columns: Sequence[str]
) -> tuple[LogProbabilityObjective, tuple[str, ...]]:
    """The objective of a loss by name, by `module.function` or itself, and the columns that it reads. columns: those
    that there are, of which someone's own function gets all.

    Raises ConfigError for one that ranks could not import, and for settings that it does not take."""
    strange = [column for column in columns if column not in _READ] if loss in ("dpo", *LOSSES) else []
    if strange:
        raise ConfigError(
            f"no named loss reads the column {strange[0]!r}: leave it out of the samples, or give a function of your "
            f"own, which gets all columns{did_you_mean([nearest(strange[0], sorted(_READ))])}"
        )
    if loss == "dpo":
        _check_settings("dpo", signature(PreferenceConfig), (), settings)
        return Dpo(PreferenceConfig(**settings)), ("reference",)
    cost, names = LOSSES[loss] if isinstance(loss, str) and loss in LOSSES else (_imported(loss), tuple(columns))
    if not callable(cost) or "<" in getattr(cost, "__qualname__", "<"):
        raise ConfigError(
            f"the loss {cost!r} is no function of a module, so ranks cannot import it. Define it at the top of a "
            "module, and give it or its name, `module.function`"
        )
    entropies = {ENTROPIES} & signature(cost).parameters.keys()
    _check_settings(str(loss), signature(cost), (None, None), settings, dict.fromkeys(entropies))
    return TokenLoss(cost, names, settings), names


def _imported(loss: str | TokenCost) -> TokenCost:
    if not isinstance(loss, str):
        return loss
    module, _, name = loss.rpartition(".")
    try:
        found: TokenCost = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"loss={loss} is neither one of {', '.join([*LOSSES, 'dpo'])} nor `module.function` of a module that can "
            f"be imported ({error}){did_you_mean([nearest(loss, [*LOSSES, 'dpo'])])}"
        ) from error
    return found


def _check_settings(
    loss: str,
    taken: Signature,
    first: tuple[None, ...],
    settings: Mapping[str, Any],
    given: Mapping[str, None] = MappingProxyType({}),
) -> None:
    """first, given: what it gets besides."""
    try:
        taken.bind(*first, **given, **settings)
    except TypeError as error:
        raise ConfigError(f"loss={loss} does not take the settings {dict(settings)}: {error}") from error
