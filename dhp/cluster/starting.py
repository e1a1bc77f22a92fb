"""Starts Ray with our time limit and without its signal handlers.

What is replaced here for the time of the start is none of Ray's public names; it is pinned with Ray, and
tests/cluster/test_starting.py fails when it is gone.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ray._private import services, utils

from dhp.cluster.child_processes import descendants, has_ended, is_named

_SERVER_WAIT = "RAY_gcs_server_port_wait_time_s"
_POLL_S = 0.1


@contextmanager
def within(timeout_s: float) -> Iterator[None]:
    """`ray.init` in here waits so long for its servers instead of 30 s, and sets no handler of SIGTERM: its own ends
    the process before a run can write its summary."""
    before = os.environ.get(_SERVER_WAIT)
    get_node, set_handler = services.get_node, utils.set_sigterm_handler
    if before is None:
        os.environ[_SERVER_WAIT] = str(max(1, round(timeout_s)))
    services.get_node = _patient(get_node, timeout_s)
    utils.set_sigterm_handler = lambda _handler: None
    try:
        yield
    finally:
        services.get_node, utils.set_sigterm_handler = get_node, set_handler
        _take_back_sigterm()
        if before is None:
            os.environ.pop(_SERVER_WAIT, None)


def _take_back_sigterm() -> None:
    """Ray's core puts a handler of its own below Python's, which prints a stack and aborts three seconds later."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _patient(get_node: Callable[[str, str], Any], timeout_s: float) -> Callable[[str, str], Any]:
    """`get_node`, asked until it knows the node: Ray itself would give up after 30 s whatever the machine."""
    deadline = time.monotonic() + timeout_s

    def ask(gcs_address: str, node_id: str) -> Any:
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError as error:  # it is not known yet
                if any(has_ended(process) and is_named(process, "raylet") for process in descendants()):
                    raise ChildProcessError("its raylet ended at once") from error
                if time.monotonic() > deadline:
                    raise TimeoutError(f"its node was not ready after {timeout_s:g} s") from error
                time.sleep(_POLL_S)

    return ask
