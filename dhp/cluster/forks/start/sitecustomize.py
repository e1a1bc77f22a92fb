"""Python imports this as it starts where this folder is on PYTHONPATH. A Ray worker sends the fork server how it was
started, and a fork of the server does the work. This process waits for its end, hands on signals, and is not survived
by it. Where no server answers, the worker starts as usual."""

import importlib
import os
import signal
import sys

SERVER = "DHP_FORK_SERVER"  # the environment variable: the server's address
MODULES = "DHP_FORK_MODULES"  # modules that are forks too when Python is started with -m, beside Ray's workers
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _hand_over(address: str) -> None:
    import array
    import json
    import socket

    ignored = [int(number) for number in HANDED_ON if signal.getsignal(number) is signal.SIG_IGN]
    start = {"words": sys.orig_argv, "environment": dict(os.environ), "folder": os.getcwd(), "ignored": ignored}
    early: list[int] = []  # what comes before the fork can receive it: it may be at work before this process knows
    with socket.socket(socket.AF_UNIX) as line:

        def hand_on(numbers: list[int]) -> None:
            try:
                line.sendall(bytes(numbers))
            except OSError:
                pass  # the fork has ended, be it before none was to be sent: its work must not be done again

        try:
            line.connect(address)
        except OSError:
            return
        taken = [number for number in HANDED_ON if number not in ignored]
        usual = [signal.signal(number, lambda number, _: early.append(number)) for number in taken]
        try:
            line.sendmsg([b"\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
            line.sendall(json.dumps(start).encode() + b"\n")
        except OSError:  # the server ended just now: without the last byte there is no fork
            for number, handler in zip(taken, usual):
                signal.signal(number, handler)
            for missed in early:
                signal.raise_signal(missed)
            return
        for number in taken:
            signal.signal(number, lambda number, _: hand_on([number]))
        hand_on(early)
        try:
            status = line.recv(1)  # when the fork has ended
        except OSError:  # the server was killed, and the fork with it
            status = b""
    os._exit(status[0] if status else 1)


def _has_a_fork(words: list[str]) -> bool:
    named = words[1:2] == ["-m"] and words[2] in os.environ.get(MODULES, "").split()
    return named or any(word.endswith("/default_worker.py") for word in words[1:3])


def _import_the_next() -> None:
    """The environment's own module of this name, which this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    own = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError:
        if own is not None:
            sys.modules["sitecustomize"] = own


if __name__ == "sitecustomize":  # not where it is imported for its names
    if SERVER in os.environ and _has_a_fork(sys.orig_argv):
        _hand_over(os.environ[SERVER])
    _import_the_next()
