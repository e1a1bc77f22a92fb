"""Prints the progress of a run's start: a line when each slow operation begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO


class StartUp:
    """Prints lines with the seconds since the command was given."""

    def __init__(self, begun: float, say: Callable[[str], None] | None = None) -> None:
        """begun: of `time.perf_counter`. say: prints a line; None: on stdout."""
        self._begun, self._say = begun, say or say_line

    def __call__(self, text: str) -> None:
        self._say(f"{time.perf_counter() - self._begun:5.1f} s  {text}")


def say_line(text: str, file: TextIO | None = None) -> None:
    """Print a line at once, on stdout where no other file is given."""
    print(text, file=file, flush=True)


def say_nothing(text: str) -> None:
    """Discard the line: the default where no progress is to be printed."""
