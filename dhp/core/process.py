"""This process: signals, start-up lines, cores, time limits."""

import ctypes
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, TextIO

INTERRUPTED = 130  # exit status that a shell reports after Ctrl-C

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last: a terminal or connection that closes
_OUTSIDE, _RUNNING, _ENDING = "outside a run", "running", "ending"


class _State:
    phase = _OUTSIDE
    interrupted = False
    deferring = False  # the first signal only asks
    asked = False
    command = False
    missed = False  # a signal came while the run was ending


def begin_command() -> None:
    """This process is a command of ours and nothing else, so that it may be ended where its end hangs; not a program
    that calls us. All signals of STOPPING are heeded from here on, and a reader of its output that ends is survived."""
    _State.command = True
    heed()
    outlive_readers()


def outlive_readers() -> None:
    """From here on what is printed and nobody reads is dropped; see `Unread`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is getattr(sys, f"__{name}__"):  # else somebody collects it
            setattr(sys, name, Unread(getattr(sys, name)))


def is_command() -> bool:
    """Whether this process is a command of ours."""
    return _State.command


def heed() -> None:
    """From here on each of them ends the process at once, with one line and exit status 130, also amid an import.

    A signal that the process was started to ignore stays ignored."""
    for number in STOPPING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle)


@contextmanager
def interruptible() -> Iterator[None]:
    """In a run each of STOPPING raises KeyboardInterrupt in the main thread, until `end` is called."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOPPING}
    _State.phase, _State.interrupted, _State.asked, _State.missed = _RUNNING, False, False, False
    heed()
    try:
        yield
    finally:
        _State.phase, _State.interrupted = _OUTSIDE, False
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferring() -> Iterator[None]:
    """In here the first signal raises nothing: `asked_to_stop` says that it came. A second one raises."""
    _State.deferring, _State.asked = True, False
    try:
        yield
    finally:
        _State.deferring = False


def asked_to_stop() -> bool:
    """Whether a signal came while it was deferred."""
    return _State.asked


def end() -> None:
    """Ignore signals from now on: called where the shutdown of a run begins, which a signal would leave half done."""
    if _State.phase == _RUNNING:
        _State.phase = _ENDING


def go_on() -> None:
    """Heed signals again: what `end` was called for was a part of the run that is begun again. Raises
    KeyboardInterrupt where one came meanwhile."""
    if _State.phase == _ENDING:
        _State.phase = _RUNNING
        if _State.missed:
            _State.interrupted = True
            raise KeyboardInterrupt


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


def missed_signal() -> bool:
    """Whether a signal came while the last run was shut down, which goes on then."""
    return _State.missed


def was_interrupted() -> bool:
    """Whether a signal has arrived in this run: a library may have caught its KeyboardInterrupt."""
    return _State.interrupted


def _handle(number: int, _frame: Any) -> None:
    if _State.phase == _OUTSIDE:
        with suppress(Exception):  # it may be printing right now
            sys.stdout.flush()
        with suppress(OSError):  # nobody may read it any more, above all where a terminal closed
            os.write(2, f"interrupted ({signal.Signals(number).name})\n".encode())
        os._exit(INTERRUPTED)  # an import cannot be left by an exception: too many libraries catch it
    if signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, None):
        signal.alarm(0)  # while Ray starts, its core's handler comes first and sets one, to abort in three seconds
    _State.missed = _State.phase == _ENDING or _State.missed
    if _State.phase == _RUNNING:
        _State.interrupted = True
        if _State.deferring and not _State.asked:
            _State.asked = True
            return
        raise KeyboardInterrupt


class Unread:
    """A text stream whose reader may end, as `head` does, or a `tee` that is killed: what is written then is dropped,
    because a run is worth more than its lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._drop_unread(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._drop_unread(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop_unread(self, put: Callable[[], Any]) -> None:
        try:
            put()
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # no reader; no terminal
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # what is buffered goes there too, also as Python ends
            os.close(nowhere)


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


def count_cores() -> int:
    """Cores of the process's affinity mask where the system has one (Linux), else all of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class OutOfTime(Exception):
    """The time limit was exceeded."""


class _Limit:
    """Of one block: when its time is over, by time.monotonic, and in which thread it runs. raised: it was ended."""

    def __init__(self, seconds: float):
        self.deadline, self.thread, self.raised = time.monotonic() + seconds, threading.get_ident(), False


class _Watch:
    """One thread that ends blocks whose time is over: a thread for each would take longer than most blocks do."""

    def __init__(self) -> None:
        # Both are C: an exception from outside cannot come between a lock's being taken and what gives it back.
        self._lock: threading.Lock = threading.Lock()
        self._earlier: SimpleQueue[None] = SimpleQueue()
        self._limits: dict[int, _Limit] = {}
        self._wakes = float("inf")  # when the thread looks again
        self._thread: threading.Thread | None = None

    def add(self, limit: _Limit) -> None:
        with self._lock:
            self._limits[id(limit)] = limit
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="dhp time limits", daemon=True)
                thread.start()
                self._thread = thread  # not before: it may fail to start
            if limit.deadline < self._wakes:
                self._earlier.put(None)

    def remove(self, limit: _Limit) -> None:
        """No exception for it comes any more, whether it was ended or not."""
        with self._lock:
            self._limits.pop(id(limit), None)
            if limit.raised:
                # Not otherwise: it makes CPython 3.11 look for an exception at every operation from then on, and a
                # profiled thread does nothing else.
                _raise_in(limit.thread, None)

    def _run(self) -> None:
        while True:
            with self._lock:
                now = time.monotonic()
                for limit in [one for one in self._limits.values() if one.deadline <= now]:
                    del self._limits[id(limit)]
                    limit.raised = True
                    _raise_in(limit.thread, OutOfTime)
                self._wakes = min((limit.deadline for limit in self._limits.values()), default=float("inf"))
                wait = None if self._wakes == float("inf") else max(self._wakes - now, 0.0)
            with suppress(Empty):
                self._earlier.get(timeout=wait)


_watch = _Watch()


def _watch_anew() -> None:
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_watch_anew)  # which has none of its parent's threads


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in here where it takes more than `seconds`. What waits inside one operation of C is not ended
    before it returns to Python. Any thread may use it; a signal's alarm is the main thread's alone."""
    limit, watch, process = _Limit(seconds), _watch, os.getpid()
    try:
        watch.add(limit)
        yield
    finally:
        if os.getpid() == process:  # a fork has no watch of its parent's, whose lock may be taken for good
            watch.remove(limit)


def _raise_in(thread: int, kind: type[Exception] | None) -> None:
    """Raise it at the thread's next Python operation; None: cancel an exception that was not raised yet."""
    exception = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)
