"""A rank's calls without Ray: what it answers, and when the memory of what it sent may be written again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dhp.cluster.transport import OBJECT_STORE, SMALLEST, Inbox, Parcel
from dhp.cluster.watch import RankRaised
from dhp.cluster.worker import GroupSettings, Worker
from dhp.errors import DataError
from dhp.sent import HANDOFF, take_sent


class Trainer:
    """Sends a tensor that tells which call made it."""

    def forward_step(self, micro_batch: int, count: int) -> tuple[Tensor, ...]:
        return tuple(torch.full((SMALLEST,), 10 * micro_batch + n, dtype=torch.uint8) for n in range(count))

    def backward_step(self, micro_batch: int, *gradients: Tensor) -> tuple[float, ...]:
        return tuple(float(gradient.double().mean()) for gradient in gradients)

    def grad_norm_sq(self) -> float:
        return 2.0

    def optimizer_step(self, *norms: float) -> dict[str, float]:
        return {"norm": sum(norms)}

    def save(self, folder: str) -> tuple[str, ...]:
        if folder == "refused":
            raise DataError("as it is")
        raise OSError(folder)


@pytest.fixture
def worker() -> Iterator[Worker]:
    yield from made()


def made(**more: Any) -> Iterator[Worker]:
    threads = torch.get_num_threads()
    found = Worker(GroupSettings("vision", 1, "gloo", threads, 60.0, None, True, **more), 0)
    found.build(Trainer, ())
    take_sent()
    yield found
    take_sent()
    torch.set_num_threads(threads)


def test_what_was_sent_stays_until_the_optimizer_step(worker: Worker) -> None:
    inbox = Inbox()
    for _ in range(2):
        sent: list[Parcel] = []
        for micro_batch in range(4):  # in the order of `vision_ahead`
            status, *parcels = worker.call("forward_step", micro_batch, 2)
            assert status is None
            sent += parcels
            if micro_batch:
                assert worker.call("backward_step", micro_batch - 1) is None
        worker.call("grad_norm_sq")  # the other part may still read until it has answered with its own
        assert worker.call("forward_step", 4, 1)[1].place == 8
        assert [parcel.place for parcel in sent] == list(range(8))
        values = [float(inbox.open(parcel).double().mean()) for parcel in sent]
        assert values == [10 * micro_batch + n for micro_batch in range(4) for n in range(2)]
        assert worker.call("optimizer_step", 3.0, 4.0) == (None, {"norm": 7.0})


def test_parcels_are_opened_before_a_verb_sees_them(worker: Worker) -> None:
    _, first, second = worker.call("forward_step", 3, 2)
    assert isinstance(first, Parcel)
    assert worker.call("backward_step", 0, first, torch.ones(2), second) == (None, 30.0, 1.0, 31.0)


def test_what_is_handed_over_is_counted_once_with_every_norm(worker: Worker) -> None:
    worker.call("forward_step", 0, 3)
    assert take_sent() == {HANDOFF: 3 * SMALLEST}
    worker.call("grad_norm_sq")
    worker.call("optimizer_step", 1.0)
    assert take_sent() == {HANDOFF: 8}


def test_through_the_object_store_tensors_travel_as_they_are() -> None:
    (worker,) = made(transport=OBJECT_STORE)
    _, sent = worker.call("forward_step", 2, 1)
    assert isinstance(sent, Tensor) and bool((sent == 20).all())


def test_errors_name_the_rank_unless_they_are_meant_for_a_person(worker: Worker) -> None:
    with pytest.raises(RankRaised, match="^vision rank 0 failed in save: OSError: full\\n"):
        worker.call("save", "full")
    with pytest.raises(DataError, match="^as it is$"):
        worker.call("save", "refused")
