"""Rules about what a run is evaluated on."""

from __future__ import annotations

from dhp.base.errors import ConfigError
from dhp.config.mixing import split_share
from dhp.config.nearest import did_you_mean, nearest
from dhp.config.schema import Config

LOSS = "eval_loss"  # of all of data.eval_datasets together; with /NAME of one


def check_evaluation(config: Config) -> None:
    """Raises ConfigError for datasets that the registry does not have, and for keys that would say nothing."""
    names, registered = [split_share(text)[0] for text in config.data.eval_datasets], list(config.data.data_registry)
    for name in names:
        if name not in registered:
            raise ConfigError(
                f"data.eval_datasets={list(config.data.eval_datasets)}: {name} is not in data.data_registry, which has "
                f"{', '.join(registered) or 'none'}{did_you_mean([nearest(name, registered)])}"
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"data.eval_datasets={list(config.data.eval_datasets)} names a dataset twice; name each once")
    for key in ("eval_steps", "best_metric"):
        if getattr(config.training, key) is not None and not names:
            raise ConfigError(
                f"training.{key}={getattr(config.training, key)}, but data.eval_datasets is empty: nothing would be "
                "evaluated. Set data.eval_datasets=[NAME], with names from data.data_registry"
            )
    best, known = config.training.best_metric, [LOSS, *(f"{LOSS}/{name}" for name in names)]
    if best is not None and best not in known:
        hint = did_you_mean([nearest(best, known)])
        raise ConfigError(f"training.best_metric={best} does not exist; choose from {', '.join(known)}{hint}")
