"""Ray's control store is asked again and again; that it does not answer is an error after a while."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RpcError

from dhp.cluster.hangs import watch
from dhp.cluster.hangs.watch import asking, require_answers
from dhp.core.errors import ClusterError


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether it answers, to be changed."""
    state = [True]

    def exists(*_: Any, timeout: float) -> bool:
        if not state[0]:
            raise RpcError("Deadline Exceeded")
        return False

    monkeypatch.setattr(watch, "global_worker", SimpleNamespace(gcs_client=SimpleNamespace(internal_kv_exists=exists)))
    monkeypatch.setattr(watch, "_EVERY_S", 0.02)
    return state


def test_silence_is_an_error_and_an_answer_in_time_is_none(answers: list[bool]) -> None:
    require_answers()  # nobody asks
    with asking():
        time.sleep(0.7)
        require_answers()
        answers[0] = False
        require_answers()
        time.sleep(0.7)
        with pytest.raises(
            ClusterError, match=r"control store \(gcs_server, .*\) has not answered 6 questions in a row"
        ):
            require_answers()
        answers[0] = True
        time.sleep(0.2)
        require_answers()
    require_answers()


def test_through_the_client_there_is_no_way_to_it(answers: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "client", SimpleNamespace(is_connected=lambda: True))
    answers[0] = False
    with asking():
        time.sleep(0.6)
        require_answers()


def test_a_driver_that_was_stopped_itself_goes_on(answers: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """On waking, its clock has gone on, and nobody has asked meanwhile."""
    monkeypatch.setattr(watch, "_EVERY_S", 60.0)
    with asking():
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 100.0)
        require_answers()


def test_five_questions_without_an_answer_are_no_error_whatever_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def exists(*_: Any, timeout: float) -> bool:
        asked.append(timeout)
        if len(asked) % 6:
            raise ValueError("no error of Ray's")
        return False

    store = SimpleNamespace(gcs_client=SimpleNamespace(internal_kv_exists=exists))
    monkeypatch.setattr(watch, "global_worker", store)
    monkeypatch.setattr(watch, "_EVERY_S", 0.01)
    with asking():
        deadline = time.monotonic() + 30
        while len(asked) < 20 and time.monotonic() < deadline:
            require_answers()
    assert len(asked) >= 20
