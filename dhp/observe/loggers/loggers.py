"""All the loggers of one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from dhp.observe.loggers.about import About
from dhp.observe.loggers.guard import GuardedLogger

END_S = 30.0  # that a run waits at its end, for all loggers together
PATIENCE_S = 2.0  # of it without a message to the user


class Loggers:
    """All loggers of a run. No method raises, and none waits but `wait`."""

    def __init__(self, names: Sequence[str], about: About) -> None:
        self._names, self._about = names, about
        self._loggers: list[GuardedLogger] = []

    def begin(self) -> None:
        """Start them. They are never asked again after they have failed."""
        self._loggers = [GuardedLogger(name, self._about) for name in self._names]
        for logger in self._loggers:
            logger.begin()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of a step by their names, as `loss`, `lr/vision` or `eval/loss`."""
        for logger in self._loggers:
            logger.log(step, numbers)

    def end(self, status: str) -> None:
        """The run has ended: completed, failed or interrupted."""
        for logger in self._loggers:
            logger.end(status)

    def wait(self, say: Callable[[str], None]) -> None:
        """Wait until all have closed the run, at most END_S."""
        deadline = time.monotonic() + END_S
        patient = time.monotonic() + PATIENCE_S
        for logger in self._loggers:
            if not logger.has_ended(patient):
                say(f"waiting for {logger.name}, at most {END_S:g} s")
        for logger in self._loggers:
            logger.wait(deadline)
        for message in self.take_messages():
            say(message)
        self._loggers = []

    def take_messages(self) -> list[str]:
        """Their messages since the last time."""
        return [message for logger in self._loggers for message in logger.take_messages()]
