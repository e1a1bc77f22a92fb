"""Where a run's layout is from: its configuration, or a plan made at its start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dhp.config.layout import GIVEN, LAYOUTS
from dhp.config.ranges import require_choice
from dhp.config.schema import Config
from dhp.core.process import say_nothing
from dhp.models.plugins import import_plugins


def with_layout(
    config: Config,
    say: Callable[[str], None] = say_nothing,
    overrides: Sequence[str] | None = None,
    new_run: bool = True,
) -> Config:
    """A composed configuration with its layout planned, where `layout` asks for that. overrides: of the command line;
    None: those of this process's. new_run: run_dir must be free for it. Raises ConfigError where no layout fits."""
    require_choice("layout", config.layout, LAYOUTS)
    if config.plugins:
        say(f"importing {', '.join(config.plugins)}")
    import_plugins(config.plugins)
    if config.layout == GIVEN:
        return config
    from dhp.trainer.forecast.auto import plan_layout  # it imports torch

    return plan_layout(config, say, overrides, new_run)
