"""A time limit for foreign Python code in this thread, as a chat template's."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class OutOfTime(Exception):
    """The time limit was exceeded."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in here where it takes more than `seconds`. What waits inside one operation of C is not ended
    before it returns to Python. Any thread may use it; a signal's alarm is the main thread's alone."""
    thread, lock, over = threading.get_ident(), threading.Lock(), False

    def end() -> None:
        with lock:
            if not over:
                _raise_in(thread, OutOfTime)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    with lock:  # starting a thread must not be interrupted
        timer.start()
    try:
        yield
    finally:
        with lock:
            over = True
            _raise_in(thread, None)  # one that was raised a moment ago, and has not come yet, is of no use any more
        timer.cancel()


def _raise_in(thread: int, kind: type[Exception] | None) -> None:
    """Raise it at the thread's next Python operation; None: cancel an exception that was not raised yet."""
    exception = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)
