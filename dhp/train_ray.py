"""`dhp train FILE.yaml|--config-name=NAME [--config-path=DIR] key=value …`: Hydra → Config → run. Also as
`python -m dhp.train_ray …`, which needs no installed package."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dhp.core.process import INTERRUPTED, begin_command

if TYPE_CHECKING:
    from dhp.config.schema import Config

BEGUN = time.perf_counter()


def start(arguments: Sequence[str]) -> None:
    """The command of this process. It ends the process where its exit status is not 0."""
    begin_command()  # before the imports, which take seconds
    from dhp.config.command_line import hydra_entry

    hydra_entry(partial(main, arguments=tuple(arguments)), arguments)


def main(config: Config, arguments: Sequence[str] = ()) -> None:
    """Check everything that can be checked, then train, or say what training would take; in a process of its own where
    training.max_restarts asks for one that may be started again. arguments: of the command, to start it again with."""
    from dhp.supervise.attempt import this_attempt

    attempt = this_attempt()
    if attempt is not None:
        from dhp.supervise.launch import reporting

        with reporting(attempt):
            _run(config)
    elif config.training.max_restarts > 0 and not config.training.dry_run:
        from dhp.supervise.launch import supervise

        status = supervise(config, arguments, _report_failure)
        if status:  # else a sweep goes on with its next job
            sys.exit(status)
    else:
        _run(config)


def _report_failure(run_dir: Path) -> None:
    """Write the page of a run that is not started again: its last attempt did not know that it was the last."""
    written, page = run_dir / "metrics.jsonl", run_dir / "report.html"
    if written.exists() and not (page.exists() and page.stat().st_mtime >= written.stat().st_mtime):
        from dhp.trainer.step_reports import write_page

        if (shown := write_page(run_dir)) is not None:
            print(f"report: {shown}", file=sys.stderr, flush=True)


def _run(config: Config) -> None:
    from dhp.core.process import StartUp, say_line

    # What a dry run prints may go into a file; progress goes to stderr.
    say = StartUp(BEGUN, partial(say_line, file=sys.stderr) if config.training.dry_run else say_line)
    try:
        from dhp.trainer.preload import preloaded

        with preloaded(config):
            if config.stages:
                from dhp.trainer.curriculum import run_curriculum

                run_curriculum(config, lambda stage: _train(stage, say), say)
            else:
                from dhp.trainer.planned_layout import with_layout
                from dhp.trainer.preflight import prepare

                planned = with_layout(config, say)
                prepared = prepare(planned, say=say)
                if prepared.training.elastic:
                    from dhp.supervise.attempt import tell_layouts
                    from dhp.trainer.planned_layout import find_layouts

                    find = partial(find_layouts, planned, prepared, say, planned=config.layout != planned.layout)
                    if prepared.training.dry_run:
                        find()
                    tell_layouts(find)
                _train(prepared, say)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)


def _train(prepared: Config, say: Callable[[str], None]) -> None:
    if prepared.training.dry_run:
        say("counting what it would take")
        from dhp.trainer.dry_run import dry_run

        print(dry_run(prepared))
        return
    say("loading PyTorch and Ray")
    from dhp.trainer.one_call import train_prepared  # after the checks: it imports torch and Ray

    train_prepared(prepared, say)


if __name__ == "__main__":
    start(sys.argv[1:])
