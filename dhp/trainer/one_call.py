"""Training in one call."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dhp.config.schema import Config
from dhp.core.errors import ConfigError
from dhp.core.process import say_line
from dhp.trainer.curriculum import run_curriculum
from dhp.trainer.planned_layout import with_layout
from dhp.trainer.preflight import prepare
from dhp.trainer.preload import preloaded
from dhp.trainer.trainer import run
from dhp.trainer.tried_cuts import with_tried_cuts


def train(config: Config, say: Callable[[str], None] = say_line) -> dict[str, Any]:
    """Check the configuration and train as it says, as `python -m dhp.train_ray` does; the run's summary.json.

    With training stages, the last one's. say: prints a line. Raises DhpError; leaves no process."""
    if config.training.dry_run:
        raise ConfigError("training.dry_run=true trains nothing; use `python -m dhp.train_ray` for it")
    done: list[Path] = []

    def run_one(prepared: Config) -> None:
        done.append(Path(prepared.run_dir))
        train_prepared(prepared, say)

    with preloaded(config):
        if config.stages:
            run_curriculum(config, run_one, say)
        else:
            run_one(prepare(with_layout(config, say), say=say))
    found = [folder / "summary.json" for folder in done]
    return dict(json.loads(found[-1].read_text())) if found else {}


def train_prepared(config: Config, say: Callable[[str], None]) -> None:
    """Train. config: went through `dhp.trainer.preflight.prepare`. Raises DhpError; leaves no process."""
    run(with_tried_cuts(config, say), say)
