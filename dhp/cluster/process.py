"""What all actors' processes share: output to a file of their own, and errors with the actor's name."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dhp.base.errors import DhpError
from dhp.cluster.watch import RankRaised

# Warnings of libraries, by text: why each is harmless here.
_UNDERSTOOD = (
    "Zero-copy tensor serialization is enabled",  # what is sent is detached and contiguous, and is not written to
    "The given NumPy array is not writable",  # the same, at the receiver
)


def silence_understood_warnings() -> None:
    """Leave out of this process's log the warnings of libraries that are known to mean nothing here."""
    for text in _UNDERSTOOD:
        warnings.filterwarnings("ignore", message=text)


def redirect_output(log_dir: str | None, name: str) -> None:
    """Redirect this process's output to `log_dir`/`name`.log, so that a run's terminal shows the run.

    On a host without the run directory, or where it cannot be written, it stays in Ray's own log, which then says so.
    """
    silence_understood_warnings()
    if log_dir is None:
        return
    try:
        # The run directory itself is not made: one of that name on another disk would hide where the logs are.
        Path(log_dir).mkdir(exist_ok=True)
        if Path(log_dir).is_symlink():
            raise OSError("it is a link")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW  # not to what a link leads to
        log = os.open(Path(log_dir) / f"{name}.log", flags, 0o644)
    except OSError as error:
        print(f"{name}: the log stays here, because {log_dir} cannot be written on this host: {error}", flush=True)
        return
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.close(log)


@contextmanager
def named_errors(who: str, what: str) -> Iterator[None]:
    """Turn an unforeseen exception into RankRaised with its traceback; errors meant for a person pass as they are.

    The name is put in here because a failure also reaches callers that depend on the result, under their names.
    """
    try:
        yield
    except DhpError:
        raise
    except Exception as error:
        text = f"{who} failed in {what}: {type(error).__name__}: {error}"
        raise RankRaised(f"{text}\n{traceback.format_exc()}") from None
