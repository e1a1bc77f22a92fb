"""Handles Ctrl-C and SIGTERM (a stopped Ray job, a scheduler): outside a run, in one, and during its shutdown."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

INTERRUPTED = 130  # exit status that a shell reports after Ctrl-C

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_OUTSIDE, _RUNNING, _ENDING = "outside a run", "running", "ending"


class _State:
    phase = _OUTSIDE
    interrupted = False


def heed() -> None:
    """From here on both signals end the process at once, with one line and exit status 130, also amid an import.

    A signal that the process was started to ignore stays ignored.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle)


@contextmanager
def interruptible() -> Iterator[None]:
    """In a run both signals raise KeyboardInterrupt in the main thread, until `end` is called."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    _State.phase, _State.interrupted = _RUNNING, False
    heed()
    try:
        yield
    finally:
        _State.phase, _State.interrupted = _OUTSIDE, False
        for number, handler in before.items():
            signal.signal(number, handler)


def end() -> None:
    """Ignore signals from now on: called where the shutdown of a run begins, which a signal would leave half done."""
    if _State.phase == _RUNNING:
        _State.phase = _ENDING


@contextmanager
def ending() -> Iterator[None]:
    """Call `end` when this block is left, in any way."""
    try:
        yield
    finally:
        end()


@contextmanager
def ending_on_error() -> Iterator[None]:
    """Call `end` when this block is left by an exception."""
    try:
        yield
    except BaseException:
        end()
        raise


def was_interrupted() -> bool:
    """Whether a signal has arrived in this run: a library may have caught its KeyboardInterrupt."""
    return _State.interrupted


def _handle(number: int, _frame: Any) -> None:
    if _State.phase == _OUTSIDE:
        with suppress(Exception):  # it may be printing right now
            sys.stdout.flush()
        os.write(2, f"interrupted ({signal.Signals(number).name})\n".encode())
        os._exit(INTERRUPTED)  # an import cannot be left by an exception: too many libraries catch it
    if signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, None):
        signal.alarm(0)  # while Ray starts, its core's handler comes first and sets one, to abort in three seconds
    if _State.phase == _RUNNING:
        _State.interrupted = True
        raise KeyboardInterrupt
