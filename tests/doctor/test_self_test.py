"""The doctor's self-test: what works has a rate, what does not says why, and advice follows."""

from __future__ import annotations

import os
from collections import namedtuple

import pytest

from dhp.doctor import host_info
from dhp.doctor.host_info import Tried, advice, try_all


def test_collectives_and_shared_memory_work_here() -> None:
    found = try_all()
    assert [one.name for one in found] == [
        "all-reduce over 2 ranks (gloo)",
        "all-to-all over 2 ranks (gloo)",
        "shared memory",
    ]
    assert all(one.rate is not None and one.rate > 0 for one in found), found


def test_ranks_that_fail_say_why() -> None:
    found = host_info._collectives(2, "nothing")
    assert all(one.rate is None and "nothing" in one.error for one in found)
    assert str(found[0]).startswith("does not work: ")


def end_at_once(rank: int, ranks: int, backend: str, folder: str) -> None:
    os._exit(3)


def test_a_rank_that_could_say_nothing_is_no_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_info, "_rank", end_at_once)
    assert {one.error for one in host_info._collectives(2, "gloo")} == {"a rank ended with status 3"}


def test_without_shared_memory_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host_info, "SharedMemory", refuse)
    assert "No space left" in str(host_info._shared_memory())
    monkeypatch.undo()
    monkeypatch.setattr(host_info.os, "posix_fallocate", lambda *given: refuse())  # a file may be made, pages not
    assert "No space left" in str(host_info._shared_memory())


def test_advice_is_about_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(host_info.shutil, "disk_usage", lambda path: usage(1, 1, 64 * 2**20))
    found = advice([Tried("all-reduce", None, "no route")], gpus=4, cpus=6)
    assert [line.split()[0] for line in found] == ["all-reduce", "/dev/shm", "6"]
    monkeypatch.setattr(host_info.shutil, "disk_usage", lambda path: usage(1, 1, 64 * 2**30))
    assert advice([Tried("all-reduce", 100.0)], gpus=4, cpus=8) == []
    assert "no GPU" in advice([], gpus=0, cpus=2)[0]


def test_rates_are_shown_in_fitting_units() -> None:
    assert (str(Tried("x", 512.4)), str(Tried("x", 20480.0))) == ("512 MiB/s", "20.0 GiB/s")
