"""Moments in host memory: what comes, what goes back, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dhp.parallel.optim.chunked_adamw import HostMoments


class Job(NamedTuple):
    moments: list[Tensor]


def test_the_next_rows_are_asked_for_before_those_at_hand_are_updated() -> None:
    host, log = HostMoments(torch.device("cpu")), []

    def jobs() -> Iterator[Job]:
        for number in range(3):
            log.append(f"ask {number}")
            yield Job([torch.full((2,), float(number))])

    for job, rows in host.ahead(jobs()):
        log.append(f"update {int(job.moments[0][0])}")
        assert torch.equal(rows[0], job.moments[0])
    assert log == ["ask 0", "ask 1", "update 0", "ask 2", "update 1", "update 2"]
    assert list(host.ahead(iter([]))) == []


def test_rows_are_others_until_they_are_put_back() -> None:
    host = HostMoments(torch.device("cpu"))
    held = host.allocate((4,), torch.bfloat16)
    assert (held.dtype, held.device.type, int(held.count_nonzero())) == (torch.bfloat16, "cpu", 0)
    ((job, rows),) = host.ahead([Job([held[1:3]])])
    rows[0] += 1
    assert int(held.count_nonzero()) == 0
    host.put_back(job.moments, rows)
    host.settle()
    assert held.tolist() == [0.0, 1.0, 1.0, 0.0]
