"""A rank's calls without Ray: what it answers, and when the memory of what it sent may be written again."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dhp.cluster import host
from dhp.cluster import worker as worker_module
from dhp.cluster.gpus import Gpu
from dhp.cluster.host import ALLOCATOR, OLD_ALLOCATOR
from dhp.cluster.transport.shared_memory import SMALLEST_BYTES, Inbox, Parcel
from dhp.cluster.worker import GIVEN, GroupSettings, Worker
from dhp.core.errors import ConfigError, DataError, RankRaised
from dhp.core.graph import CUDA_IPC, OBJECT_STORE
from dhp.core.reports import StageReport
from dhp.core.tracing import HANDOFF, take_sent


class Trainer:
    """Sends a tensor that tells which call made it."""

    def forward_step(self, micro_batch: int, count: int) -> tuple[Tensor, ...]:
        return tuple(torch.full((SMALLEST_BYTES,), 10 * micro_batch + n, dtype=torch.uint8) for n in range(count))

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


def call(worker: Worker, method: str, *arguments: Any) -> Any:
    """One verb."""
    return worker.call(((method, (GIVEN,) * len(arguments)),), *arguments)


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
            status, *parcels = call(worker, "forward_step", micro_batch, 2)
            assert status is None
            sent += parcels
            if micro_batch:
                assert call(worker, "backward_step", micro_batch - 1) is None
        call(worker, "grad_norm_sq")  # the other part may still read until it has answered with its own
        assert call(worker, "forward_step", 4, 1)[1].buffer == 8
        assert [parcel.buffer for parcel in sent] == list(range(8))
        values = [float(inbox.open(parcel).double().mean()) for parcel in sent]
        assert values == [10 * micro_batch + n for micro_batch in range(4) for n in range(2)]
        assert call(worker, "optimizer_step", 3.0, 4.0) == (None, {"norm": 7.0})


def test_verbs_of_one_call_run_in_turn(worker: Worker) -> None:
    _, first = call(worker, "forward_step", 1, 1)
    verbs = (("backward_step", (0, GIVEN)), ("grad_norm_sq", ()), ("forward_step", (2, GIVEN)))
    answered, gradient, norm, *parcels = worker.call(verbs, first, 2)
    assert (answered, gradient, norm, len(parcels)) == (None, 10.0, 2.0, 2)
    assert [float(Inbox().open(parcel).double().mean()) for parcel in parcels] == [20.0, 21.0]
    assert worker.call((("backward_step", (0,)), ("backward_step", (1,)))) is None


def test_the_report_of_a_step_tells_how_long_its_verbs_took(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    report = StageReport(0, None, 1.0, {}, None, {})
    monkeypatch.setattr(Trainer, "optimizer_step", lambda trainer, *norms: report)
    monkeypatch.setattr(Trainer, "backward_step", lambda trainer, micro_batch: time.sleep(0.05))
    monkeypatch.setattr(Trainer, "save", lambda trainer, folder: time.sleep(0.5))
    call(worker, "backward_step", 0)
    call(worker, "save", "x")  # no part of a step
    (_, first), (_, second) = call(worker, "optimizer_step"), call(worker, "optimizer_step")
    assert 0.05 <= first.busy_s < 0.5 and 0 <= second.busy_s < first.busy_s
    assert 0.05 <= first.spent["backward"].own_s < 0.5 and set(first.spent) == {"backward", "optimizer"}
    assert first.busy_s == sum(one.own_s for one in first.spent.values()) and set(second.spent) == {"optimizer"}
    assert replace(first, busy_s=None, spent={}) == report


def test_the_heartbeat_says_which_method_of_which_step_it_is_in(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doing() -> tuple[int, str, int | None]:
        beat = worker._heart.beat()
        return beat.step, beat.verb, beat.micro_batch

    seen = []
    monkeypatch.setattr(Trainer, "backward_step", lambda trainer, micro_batch: seen.append(doing()))
    assert doing() == (1, "", None)
    call(worker, "optimizer_step")
    call(worker, "backward_step", 3)
    assert seen == [(2, "backward_step", 3)] and doing() == (2, "", None)
    (resumed,) = made(steps_done=40)
    assert resumed._heart.beat().step == 41


def test_parcels_are_opened_before_a_verb_sees_them(worker: Worker) -> None:
    _, first, second = call(worker, "forward_step", 3, 2)
    assert isinstance(first, Parcel)
    assert call(worker, "backward_step", 0, first, torch.ones(2), second) == (None, 30.0, 1.0, 31.0)


def test_what_is_handed_over_is_counted_once_with_every_norm(worker: Worker) -> None:
    call(worker, "forward_step", 0, 3)
    assert take_sent() == {HANDOFF: 3 * SMALLEST_BYTES}
    call(worker, "grad_norm_sq")
    call(worker, "optimizer_step", 1.0)
    assert take_sent() == {HANDOFF: 8}


def test_through_the_object_store_tensors_travel_as_they_are() -> None:
    (worker,) = made(transport=OBJECT_STORE)
    _, sent = call(worker, "forward_step", 2, 1)
    assert isinstance(sent, Tensor) and bool((sent == 20).all())


def test_errors_name_the_rank_unless_they_are_meant_for_a_person(worker: Worker) -> None:
    with pytest.raises(RankRaised, match="^vision rank 0 failed in save: OSError: full\\n"):
        call(worker, "save", "full")
    with pytest.raises(DataError, match="^as it is$"):
        call(worker, "save", "refused")


def test_a_process_with_one_device_is_the_first_of_its_devices_whatever_started_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    for _ in made():
        assert os.environ["LOCAL_RANK"] == "0"


@pytest.mark.parametrize("value", ["1", "true"])
def test_a_rank_that_would_see_all_gpus_is_refused_when_it_joins(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr(host, "_address", lambda: "10.0.0.6")
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", value)
    (worker,) = made(cuda=True)
    told = "^node 10.0.0.6, where vision rank 0 runs: RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=.* Unset it"
    with pytest.raises(ConfigError, match=told):
        worker.join("127.0.0.1", 1)


def test_a_rank_that_joins_looks_at_its_nodes_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_address", lambda: "10.0.0.6")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", raising=False)
    (worker,) = made(cuda=True)
    with pytest.raises(ConfigError, match="^node 10.0.0.6, where vision rank 0 runs: .* built for CPUs alone"):
        worker.join("127.0.0.1", 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(worker_module, "read_gpus", lambda sizes: (Gpu(0, "580.65.06", "Exclusive_Process"),))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nowhere")
    (worker,) = made(cuda=True, shares_gpu=True)
    with pytest.raises(ConfigError, match="^node 10.0.0.6, where vision rank 0 runs: .*GPU 0 Exclusive_Process"):
        worker.join("127.0.0.1", 1)


def test_a_rank_on_a_gpu_lets_its_memory_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ALLOCATOR, OLD_ALLOCATOR):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for cuda, transport, set_to in (
        (False, OBJECT_STORE, None),
        (True, OBJECT_STORE, "True"),
        (True, CUDA_IPC, "True"),
    ):
        for _ in made(cuda=cuda, transport=transport):
            assert os.environ.get(ALLOCATOR) == (None if set_to is None else f"expandable_segments:{set_to}")


@pytest.mark.parametrize(("backend", "device"), [("gloo", None), ("cpu:gloo,cuda:nccl", torch.device("cuda", 0))])
def test_nccl_connects_as_the_rank_joins(
    backend: str, device: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the first collective, whose step would have to wait for it, and for its failure."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(worker_module.dist, "init_process_group", lambda *_, **named: given.update(named))
    monkeypatch.setattr(worker_module.dist, "TCPStore", lambda *_, **__: None)
    worker = Worker(GroupSettings("vision", 1, backend, torch.get_num_threads(), 60.0, None, True), 0)
    worker.join("127.0.0.1", 1)
    assert given["device_id"] == device


def test_threads_are_no_more_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts Ray may give a node more CPUs than it has: threads without a core of their own make steps six
    times as long."""
    before = torch.get_num_threads()
    monkeypatch.setattr(worker_module, "count_cores", lambda: 3)
    for asked, taken in ((64, 3), (2, 2)):
        Worker(GroupSettings("vision", 1, "gloo", asked, 60.0, None, True), 0)
        assert torch.get_num_threads() == taken
    torch.set_num_threads(before)
