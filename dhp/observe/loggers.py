"""Runs each logger in a process that may fail alone.

Their processes are started by name and not by multiprocessing, which would execute the user's own script again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from dhp.core.text import json_safe
from dhp.observe.logger_process import RunInfo

BACKLOG = 1000  # steps that a logger may be behind
FAILURES = 3  # in a row, after which the run goes on without a logger
ROOT = Path(__file__).parents[2]  # that has the package `dhp`
KEPT = "metrics.jsonl has every step"


class GuardedLogger:
    """One logger of a run. No method waits for it but `wait`, and none raises what it raises.

    A thread hands its process one call at a time and takes the answer; it ends with the process."""

    def __init__(self, name: str, about: RunInfo) -> None:
        self.name, self._about = name, about
        self._log = Path(about.run_dir) / "loggers" / f"{name}.log"  # the logger's own output
        self._calls: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._messages: list[str] = []
        self._sent: list[int] = []  # steps that no answer has come to, oldest first
        self._lost: list[int] = []
        self._failures, self._dropped = 0, False
        self._ended = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def begin(self) -> None:
        """Start the logger's process. Its output goes to `<run_dir>/loggers/<name>.log`."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        try:
            self._log.parent.mkdir(exist_ok=True)
            with open(self._log, "a", encoding="utf-8") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "dhp.observe.logger_process", self.name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, "PYTHONPATH": path},
                    start_new_session=True,  # Ctrl-C is for the run
                )
        except OSError as error:
            self._drop(f"its process could not be started ({error})")
            self._ended.set()
            return
        self._calls.put(["begin", asdict(self._about)])
        self._thread.start()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Hand over the numbers of a step."""
        with self._lock:
            if self._dropped:
                self._lost.append(step)
                return
            self._sent.append(step)
            behind = len(self._sent) > BACKLOG
        if behind:
            self._drop(f"it is {BACKLOG} steps behind")
        else:
            self._calls.put(["log", step, json_safe(numbers)])

    def end(self, status: str) -> None:
        """Say that the run has ended; `wait` waits for the logger's own end."""
        self._calls.put(["end", status])

    def has_ended(self, deadline: float) -> bool:
        """Whether the logger closes the run until `deadline` of time.monotonic."""
        return self._ended.wait(max(0.0, deadline - time.monotonic()))

    def wait(self, deadline: float) -> None:
        """Wait until the logger has closed the run, at most until `deadline` of time.monotonic; then its process is
        killed, with all that it started itself."""
        ended = self.has_ended(deadline)
        if not ended:
            self._drop("it did not end in time")
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.5, deadline - time.monotonic()) if ended else 0)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its session
            self._calls.put(None)
            self._thread.join()
        if self._lost:
            self._say(f"{self.name} lacks {_steps_text(self._lost)}; {KEPT}")
            self._lost = []

    def take_messages(self) -> list[str]:
        """Messages since the last time."""
        with self._lock:
            taken, self._messages = self._messages, []
        return taken

    def _say(self, text: str) -> None:
        with self._lock:
            self._messages.append(text)

    def _drop(self, why: str) -> None:
        """Stop using this logger from now on. It may still close what it has taken."""
        with self._lock:
            if self._dropped:
                return
            self._dropped = True
            self._lost += self._sent
            self._sent = []
        self._say(f"logging to {self.name} has stopped, training goes on: {why}; see {self._log}")
        self._calls.put(None)

    def _work(self) -> None:
        """Hand over the calls, one after another, until there are no more or the process ends."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        with process:
            with suppress(OSError):  # it died, which the end of its answers says too
                for call in iter(self._calls.get, None):
                    process.stdin.write(json.dumps(call) + "\n")
                    process.stdin.flush()
                    answer = process.stdout.readline()
                    if not answer or self._takes_no_more(json.loads(answer)):
                        break
                process.stdin.close()
            for answer in process.stdout:  # to the end of its stdin
                self._takes_no_more(json.loads(answer))
            if not self._ended.is_set():
                self._drop(f"its process ended (status {process.wait()})")
                self._ended.set()

    def _takes_no_more(self, answer: Mapping[str, Any]) -> bool:
        """Take an answer in; whether it was the last one."""
        error = answer.get("error")
        if "log" in answer:
            with self._lock:
                self._lost += self._sent[:1] if error else []
                self._sent = self._sent[1:]
            self._failures = self._failures + 1 if error else 0
            if self._failures == FAILURES:
                self._drop(f"it failed {FAILURES} times in a row ({error})")
        elif error is not None:
            self._drop(f"it could not {'begin' if 'begin' in answer else 'close the run'} ({error})")
        elif "begin" in answer:
            self._say(f"logging to {self.name}: {answer['begin']}")
        if "end" in answer:
            self._ended.set()
        return "end" in answer


def _steps_text(steps: list[int]) -> str:
    """`step 5`, `steps 5 to 9`, `6 steps between 2 and 30`."""
    first, last, count = min(steps), max(steps), len(set(steps))
    if count == 1:
        return f"step {first}"
    return f"steps {first} to {last}" if count == last - first + 1 else f"{count} steps between {first} and {last}"


END_S = 30.0  # that a run waits at its end, for all loggers together
PATIENCE_S = 2.0  # of it without a message to the user


class Loggers:
    """All loggers of a run. No method raises, and none waits but `wait`."""

    def __init__(self, names: Sequence[str], about: RunInfo) -> None:
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
