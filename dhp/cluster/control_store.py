"""Whether the control store of a Ray that others started still answers. Ray's core waits a minute for one that is gone,
then aborts the driver without a word; one that is stopped it waits for without end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ray._private.worker import global_worker
from ray.exceptions import RayError
from ray.util.client import ray as client

from dhp.core.errors import ClusterError

SILENT_S = 30.0
_EVERY_S = 5.0
_ANSWER_S = 5.0
_KEY = b"dhp"  # of nothing: whether it exists is the shortest question


class _Answers:
    """Of this process's Ray; None: nobody asks."""

    last: float | None = None


@contextmanager
def asking() -> Iterator[None]:
    """In the block a thread asks it again and again. Not through Ray's client (`ray://`), which has no way to it."""
    if client.is_connected():
        yield
        return
    ended = threading.Event()
    _Answers.last = time.monotonic()
    asker = threading.Thread(target=_ask, args=(ended,), name="control store", daemon=True)
    asker.start()
    try:
        yield
    finally:
        ended.set()
        asker.join(_ANSWER_S)
        _Answers.last = None


def require_answers() -> None:
    """Raise ClusterError where it has not answered for `SILENT_S`."""
    last = _Answers.last
    if last is not None and time.monotonic() - last > SILENT_S:
        raise ClusterError(
            f"Ray's control store (gcs_server, on the cluster's head) has not answered for {SILENT_S:g} s, and the run "
            "ends: without it no actor can be started or ended, and no death of a node is known. It was killed or "
            "stopped there, or the network to the head is gone: see `ray status` and gcs_server.err on the head, start "
            "the cluster again, and continue with training.resume=auto"
        )


def _ask(ended: threading.Event) -> None:
    while not ended.wait(_EVERY_S):
        try:
            global_worker.gcs_client.internal_kv_exists(_KEY, None, timeout=_ANSWER_S)
        except RayError:
            continue
        _Answers.last = time.monotonic()
