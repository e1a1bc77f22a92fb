"""What a run says of its start: a line for each thing that takes time, when it begins."""

from __future__ import annotations

import time


class StartUp:
    """Prints lines with the seconds since the command was given."""

    def __init__(self, begun: float) -> None:
        """begun: of `time.perf_counter`."""
        self._begun = begun

    def __call__(self, text: str) -> None:
        say_line(f"{time.perf_counter() - self._begun:5.1f} s  {text}")


def say_line(text: str) -> None:
    """Print a line at once, on stdout."""
    print(text, flush=True)


def say_nothing(text: str) -> None:
    """For whoever starts something without an audience."""
