"""Whether the control store of a Ray that others started still answers. Ray's core waits a minute for one that is gone,
then aborts the driver without a word; one that is stopped it waits for without end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ray._private.worker import global_worker
from ray.util.client import ray as client

from dhp.core.errors import ClusterError

QUESTIONS = 6  # without an answer, in a row: half a minute. No clock says it: this process may have been stopped itself
_EVERY_S = 5.0
_ANSWER_S = 5.0
_KEY = b"dhp"  # of nothing: whether it exists is the shortest question


class _Answers:
    """How many of the last questions had none."""

    missing = 0


class _Asked:
    """Of this process's Ray; None: nobody asks."""

    now: _Answers | None = None


@contextmanager
def asking() -> Iterator[None]:
    """In the block a thread asks it again and again. Not through Ray's client (`ray://`), which has no way to it."""
    if client.is_connected():
        yield
        return
    ended, _Asked.now = threading.Event(), _Answers()
    asker = threading.Thread(target=_ask, args=(ended, _Asked.now), name="control store", daemon=True)
    asker.start()
    try:
        yield
    finally:
        ended.set()
        asker.join(_ANSWER_S)
        _Asked.now = None


def require_answers() -> None:
    """Raise ClusterError where it has not answered the last `QUESTIONS`."""
    answers = _Asked.now
    if answers is not None and answers.missing >= QUESTIONS:
        raise ClusterError(
            f"Ray's control store (gcs_server, on the cluster's head) has not answered {QUESTIONS} questions in a row, "
            f"each within {_ANSWER_S:g} s, and the run ends: without it no actor can be started or ended, and no death "
            "of a node is known. It was killed or stopped there, or the network to the head is gone: see `ray status` "
            "and gcs_server.err on the head, start the cluster again, and continue with training.resume=auto"
        )


def _ask(ended: threading.Event, answers: _Answers) -> None:
    spent_s = 0.0
    while not ended.wait(max(0.0, _EVERY_S - spent_s)):
        begun = time.monotonic()
        try:
            global_worker.gcs_client.internal_kv_exists(_KEY, None, timeout=_ANSWER_S)
            answers.missing = 0
        except Exception:  # whatever Ray raises of it, there was no answer; `require_answers` reports that
            answers.missing += 1
        spent_s = time.monotonic() - begun
