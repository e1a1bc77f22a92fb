"""Launches the supervisor and the driver of a run."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dhp.config.command_line import exit_with, same_command
from dhp.config.run_dir import continues
from dhp.config.schema import Config
from dhp.core.errors import DhpError
from dhp.core.process import INTERRUPTED, say_line
from dhp.supervise.attempt import RETRY, Attempt
from dhp.supervise.policy import Rules
from dhp.supervise.supervisor import LOGGERS_S, STOPPING_S, Begun, Supervisor

AUTO, NEVER = "auto", "never"


def supervise(config: Config, arguments: Sequence[str], given_up: Callable[[Path], None]) -> int:
    """Train as configured, in as many attempts as it takes; the exit status. arguments: of this process. given_up:
    called with run_dir where this run's own record is in it and the run did not complete."""
    rules = Rules(config.training.max_restarts, config.training.restart_wait_s)
    stopping_s = STOPPING_S + (LOGGERS_S if config.training.loggers else 0.0)
    commands = partial(_command, config, arguments)
    saving_s = config.cluster.step_timeout_s + config.training.save_timeout_s
    once = not config.stages
    run = Supervisor(commands, Path(config.run_dir), rules, say_line, stopping_s, ends_once=once, saving_s=saving_s)
    status = run.run()
    if status and run.opened:
        given_up(Path(config.run_dir))
    return status


def _command(config: Config, arguments: Sequence[str], begun: Begun) -> list[str]:
    return [sys.executable, "-m", "dhp.train_ray", *same_command(arguments, changes(config, begun), begun.layout)]


def changes(config: Config, begun: Begun) -> dict[str, str]:
    """What an attempt is asked for otherwise than the first one was. begun: what the attempts before it did.

    Until one of them has made run_dir its own, it is as the first: what is there is another run's. Then it continues
    that run, from its newest checkpoint or, where it has none, from where it began: from its first step, or from the
    checkpoint of another run that training.resume names, for which what the failed attempt left is replaced."""
    fixed = {"run_dir": config.run_dir}  # its default has the time in it
    if not begun.opened:
        return fixed
    if config.stages:  # each of them continues what it finds
        return fixed | {"overwrite": "false"}
    resume = config.training.resume
    if begun.saved or resume == NEVER or continues(config):
        return fixed | {"overwrite": "false", "training.resume": AUTO}
    return fixed | {"overwrite": "true", "training.resume": resume}


@contextmanager
def reporting(attempt: Attempt) -> Iterator[None]:
    """In a supervised driver: say how this block ended. An error after which another attempt may do better ends the
    process with `RETRY`; others pass through."""
    try:
        yield
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            attempt.ended(KeyboardInterrupt())
        raise
    except BaseException as error:
        verdict = attempt.ended(error)
        if verdict.restartable and isinstance(error, DhpError):
            exit_with(error, RETRY)
        raise
    attempt.ended(None)
