"""Python imports this as it starts where this folder is on PYTHONPATH: in each process of a run. One function of dhp,
named by the environment, is wrapped as its module is imported; in the first process of the named kind that comes to it,
a signal is raised there, once. dhp itself knows nothing of it. Imports nothing of dhp."""

import functools
import json
import os
import sys
import threading
import time

from experiments.on_import import wrap_on_import

VARIABLE = "DHP_CHAOS_POINT"
DURING_S = 0.002  # after the call began
_LOG = ".log"


def process_name():
    """`text-1`, `data`, `data-0` of an actor, by its log; `driver`, `supervisor`, and `other` before it has one."""
    if any(word in ("dhp.train_ray", "dhp/train_ray.py") for word in sys.orig_argv):
        return "driver" if "DHP_ATTEMPT" in os.environ else "supervisor"
    try:
        log = os.path.basename(os.readlink("/proc/self/fd/1"))
    except OSError:
        return "other"
    return log[: -len(_LOG)] if log.endswith(_LOG) else "other"


class Strike:
    """Of one point: counts calls, and raises the signal in the call that is due."""

    def __init__(self, plan):
        self._plan, self._calls, self._lock = plan, 0, threading.Lock()

    def around(self, function):
        """The function, with the point before, during or after it."""
        when = self._plan["when"]

        @functools.wraps(function)
        def wrapper(*arguments, **named):
            if not self._is_due():
                return function(*arguments, **named)
            if when == "before":
                self.strike()
            if when == "during":
                threading.Timer(DURING_S, self.strike).start()
            if when == "half":
                self._write_half(arguments[0])
            found = function(*arguments, **named)
            if when == "after":
                self.strike()
            return found

        return wrapper

    def strike(self):
        """Raise the signal, unless it was raised in this run already."""
        try:
            handle = os.open(self._plan["fired"], os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        fired = {"pid": os.getpid(), "at": time.time(), "process": process_name()}
        os.write(handle, json.dumps(fired).encode())
        os.close(handle)
        os.kill(os.getpid(), self._plan["signal"])
        time.sleep(60)  # a signal may take a moment to arrive

    def _is_due(self):
        if process_name() not in self._plan["processes"] or os.path.exists(self._plan["fired"]):
            return False
        with self._lock:
            self._calls += 1
            return self._calls == self._plan["skip"] + 1

    def _write_half(self, writer):
        """Of a writer of lines, as `dhp.observe.metrics.MetricsWriter`: half of one reaches the file."""
        writer._lines.write('{"kind": "train", "step": ')
        writer._lines.flush()
        self.strike()


if __name__ == "sitecustomize" and VARIABLE in os.environ:
    _plan = json.loads(os.environ[VARIABLE])
    _module, _function = _plan["target"].split(":")
    wrap_on_import(_module, [_function], Strike(_plan).around)
