"""The loggers that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from dhp.base.errors import ConfigError
from dhp.config.load import to_yaml
from dhp.config.schema import Config
from dhp.observe.loggers.about import About
from dhp.observe.loggers.loggers import Loggers


def make_loggers(config: Config, run_dir: Path, resumed: bool) -> Loggers | None:
    """The loggers of training.loggers; None: there are none. resumed: the run goes on where one in run_dir stopped."""
    if not config.training.loggers:
        return None
    about = About(
        name=run_dir.absolute().name,
        project=config.training.logger_project or config.name,
        run_dir=str(run_dir.absolute()),
        config=to_yaml(config),
        resumed=resumed,
    )
    return Loggers(config.training.loggers, about)


def require_loggers(config: Config) -> None:
    """Raises ConfigError for a logger whose package is not installed."""
    if not config.training.loggers:
        return
    from dhp.parallel.extras import find_extra

    for name in config.training.loggers:
        if find_extra(name).version is None:
            raise ConfigError(
                f"training.loggers={config.training.loggers}: {name} is not installed here, where the run's loop runs. "
                f"Install it into this environment with `pip install {name}`, or leave it out: metrics.jsonl and "
                "TensorBoard's files are always written"
            )
