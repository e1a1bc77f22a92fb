"""Opens a run's directory and the checkpoint that it starts from, before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dhp.checkpoint.folder import check_writable, remove_unfinished
from dhp.checkpoint.resume import Start, find_start
from dhp.config.parts import parts
from dhp.config.run_dir import make_run_dir, replaces_checkpoints, run_directory
from dhp.config.schema import Config
from dhp.core.fencing import fenced
from dhp.core.process import interruptible
from dhp.supervise.attempt import tell_opened
from dhp.trainer.resume import check_recipe, free_layout, recipe
from dhp.trainer.settings import kept_settings


@contextmanager
def open_run(config: Config, say: Callable[[str], None]) -> Iterator[tuple[Path, Start]]:
    """Hold the run's directory, made anew or continued: the directory, and the checkpoint that it starts from. Signals
    raise KeyboardInterrupt meanwhile. Raises ConfigError and CheckpointError."""
    checkpoint_dir = Path(str(config.training.checkpoint_dir))
    with interruptible(), run_directory(config, say) as run_dir:
        start = find_start(config.training.resume, checkpoint_dir, replaces_checkpoints(config), say)
        start.check(kept_settings(config), list(parts(config)))
        check_recipe(config, start)
        make_run_dir(config)
        check_writable(checkpoint_dir)
        for line in [*start.quarantine(), *start.changes(recipe(config), free_layout(config))]:
            say(line)
        with fenced(checkpoint_dir):
            tell_opened()
            remove_unfinished(checkpoint_dir)
            yield run_dir, start
