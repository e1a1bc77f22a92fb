"""Code that would never end is ended, and nothing is left to come afterwards."""

from __future__ import annotations

import threading

import pytest

from dhp.core.process import OutOfTime, time_limit


def loop() -> None:
    while True:
        pass


def test_what_never_ends_is_ended() -> None:
    with pytest.raises(OutOfTime), time_limit(0.05):
        loop()


def test_in_any_thread_and_in_that_one_alone() -> None:
    ended: list[BaseException] = []

    def run() -> None:
        try:
            with time_limit(0.05):
                loop()
        except OutOfTime as error:
            ended.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    with time_limit(600):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(ended) == 2


def test_what_ends_in_time_leaves_nothing() -> None:
    before = threading.active_count()
    for _ in range(20):
        with time_limit(600):
            pass
    while threading.active_count() > before:  # timers that were cancelled end
        pass


def test_an_error_goes_through_as_it_is() -> None:
    with pytest.raises(KeyError), time_limit(600):
        raise KeyError


def test_what_comes_at_the_end_is_raised_or_forgotten_but_not_left() -> None:
    """However close the end of the code is to the end of the time."""
    for _ in range(200):
        try:
            with time_limit(0):
                pass
        except OutOfTime:
            pass
        for _ in range(100):  # where it would come if it had been left
            pass
