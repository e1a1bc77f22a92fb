"""A logger's own process: `python -m dhp.observe.loggers.process NAME`.

JSON comes in on stdin, a message a line, and an answer to each goes out on what was stdout; whatever the logger itself
prints goes to stderr, a file. The process ends after the run's end, or when its stdin is closed: the run is gone, or
does without this logger.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Queue
from typing import Any, TextIO

from dhp.observe.loggers.about import About
from dhp.observe.loggers.adapters import ADAPTERS, Logger, Status
from dhp.observe.numbers import from_json

LAST_S = 60.0  # from the end of stdin: a logger that hangs then would outlive its run, which waits for less


def main(name: str) -> None:
    """Answer until there is nothing more to do."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the run decides when its loggers end
        signal.signal(number, signal.SIG_IGN)
    calls, answers = _own_streams()
    lines: Queue[str] = Queue()
    threading.Thread(target=_read, args=(calls, lines), daemon=True).start()
    logger = ADAPTERS[name]()
    status: Status = "failed"
    while line := lines.get():
        message = json.loads(line)
        if "end" in message:
            status = message["end"]
            break
        _answer(answers, logger, message)
    _tell(answers, _outcome("ended", lambda: logger.end(status)))


def _read(calls: TextIO, lines: Queue[str]) -> None:
    """Hand the lines over, and end the process some time after the last one, whatever the logger is doing then."""
    for line in calls:
        lines.put(line)
    lines.put("")
    time.sleep(LAST_S)
    os._exit(1)


def _answer(answers: TextIO, logger: Logger, message: Mapping[str, Any]) -> None:
    if "begin" in message:
        _tell(answers, _outcome("began", lambda: logger.begin(About(**message["begin"]))))
    else:
        numbers = {key: from_json(value) for key, value in message["numbers"].items()}
        _tell(answers, _outcome("logged", lambda: logger.log(message["step"], numbers)))


def _tell(answers: TextIO, answer: Mapping[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the run no longer reads; what the logger has is to be closed all the same
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _outcome(verb: str, call: Callable[[], Any]) -> dict[str, Any]:
    """{verb: what the call gave}, or {verb, error} where it raised: a library may raise anything, SystemExit too."""
    try:
        return {verb: call()}
    except BaseException as error:
        lines = str(error).strip().splitlines()
        return {verb: None, "error": f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__}


def _own_streams() -> tuple[TextIO, TextIO]:
    """stdin and stdout for the messages alone: the logger finds an empty stdin, so that it cannot prompt for a key, and
    its output goes where stderr goes."""
    calls, answers = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return calls, answers


if __name__ == "__main__":
    main(sys.argv[1])
