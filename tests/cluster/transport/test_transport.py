"""Values that processes hand over, in shared memory."""

import os
import threading
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dhp.cluster.gpus import choose_transport
from dhp.cluster.transport import device_memory, shared_memory
from dhp.cluster.transport.shared_memory import (
    PAGE,
    REFUSED,
    SMALLEST_BYTES,
    Inbox,
    Lookahead,
    Outbox,
    Parcel,
    RemoteValue,
    pin_tensors,
    take_refusals,
)
from dhp.core.errors import ConfigError, PartFailed
from tests.helpers.ranks import context


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Values by the names that stand for refs; one that is not there raises, as a lost one does."""
    values: dict[str, Any] = {}
    monkeypatch.setattr(shared_memory.ray, "get", values.__getitem__)
    return values


def test_values_are_prepared_in_order_before_anybody_asks(store: dict[str, Any]) -> None:
    events: list[str] = []
    done = threading.Event()

    def prepare(value: str) -> str:
        events.append(f"pin {value}")
        if value == "b":
            done.set()
        return value.upper()

    ahead = Lookahead(prepare)
    store |= {"first": "a", "second": RemoteValue("third"), "third": "b", "other": "c"}
    ahead.begin(["first", "second"])
    assert done.wait(60)
    events.append("step begins")
    assert [ahead.take(RemoteValue(ref)) for ref in ("first", "second")] == ["A", "B"]
    assert events == ["pin a", "pin b", "step begins"]
    assert ahead.take(RemoteValue("other")) == "c"  # nobody began to: as it is


def test_what_is_under_way_is_waited_for_and_what_is_lost_is_raised_where_it_is_needed(store: dict[str, Any]) -> None:
    held = threading.Event()
    ahead = Lookahead(lambda value: (held.wait(60), value)[1])
    store["late"] = 7
    ahead.begin(["late", "lost"])
    threading.Timer(0.05, held.set).start()
    assert ahead.take(RemoteValue("late")) == 7
    with pytest.raises(KeyError, match="lost"):
        ahead.take(RemoteValue("lost"))


def test_a_step_is_taken_behind_the_call_that_begins_the_next_one(store: dict[str, Any]) -> None:
    """As a rank's calls come: its look ahead to the next step, then the verbs of this one."""
    prepared: list[int] = []
    ahead = Lookahead(lambda value: (prepared.append(value), -value)[1])
    store |= {number: number for number in range(1, 6)}
    taken = []
    for number in range(1, 5):
        ahead.begin([number + 1])
        taken.append(ahead.take(RemoteValue(number)))
    assert taken == [1, -2, -3, -4]  # nobody looked ahead for the first; all else is fetched once, and prepared
    assert ahead.take(RemoteValue(5)) == -5 and prepared == [2, 3, 4, 5]


def test_what_nobody_looked_ahead_for_is_found_where_it_leads_to(store: dict[str, Any]) -> None:
    store |= {"shard": RemoteValue("video"), "video": 7}
    assert Lookahead(lambda value: value).take(RemoteValue("shard")) == 7


def test_a_step_that_never_came_is_forgotten(store: dict[str, Any]) -> None:
    seen: list[int] = []
    ahead = Lookahead(lambda value: (seen.append(value), value)[1])
    store |= {"old": 1, "new": 2, "newer": 3}
    for ref in ("old", "new", "newer"):
        ahead.begin([ref])
    assert list(ahead._begun) == ["new"] and list(ahead._coming) == ["newer"]
    assert ahead.take(RemoteValue("new")) == 2 and ahead.take(RemoteValue("newer")) == 3
    assert not ahead._begun and not ahead._coming


@dataclass(frozen=True)
class Work:
    pixels: torch.Tensor
    positions: torch.Tensor
    lengths: tuple[int, ...]


def test_large_tensors_of_a_shard_are_pinned_and_all_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda self: (pinned.append(tuple(self.shape)), self.clone())[1], raising=False
    )
    work = Work(torch.ones(64, 1176), torch.ones(64), (64,))
    found = pin_tensors(work)
    assert pinned == [(64, 1176)] and torch.equal(found.pixels, work.pixels)
    assert found.positions is work.positions and found.lengths == (64,)
    small = Work(torch.ones(2), torch.ones(2), (2,))
    assert pin_tensors(small) is small and pin_tensors(5) == 5


LARGE = SMALLEST_BYTES  # elements


def _receive(pipe: Connection) -> None:
    """Another process: opens what comes, answers with its sum, shape and format."""
    inbox = Inbox()
    while (value := pipe.recv()) is not None:
        tensor = inbox.open(value)
        pipe.send((float(tensor.double().sum()), tuple(tensor.shape), tensor.dtype, len(inbox._mapped)))


@pytest.fixture
def receiver() -> Connection:
    here, there = context().Pipe()
    process = context().Process(target=_receive, args=(there,), daemon=True)
    process.start()
    there.close()  # or nobody would notice that the receiver has ended
    yield here
    here.send(None)
    process.join(30)
    assert process.exitcode == 0


def _crossed(receiver: Connection, value: Parcel | Tensor) -> tuple[float, tuple[int, ...], torch.dtype, int]:
    receiver.send(value)
    assert receiver.poll(60)
    return receiver.recv()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_cross_and_memory_is_mapped_once_for_all_steps(receiver: Connection, dtype: torch.dtype) -> None:
    outbox = Outbox()
    for step in range(3):
        # Two tensors a step, which shrink: both find room in what was mapped first.
        tensors = [torch.full((LARGE - 100 * step, 2), step + k + 1, dtype=dtype) for k in range(2)]
        for buffer, tensor in enumerate(tensors):
            parcel = outbox.send(tensor)
            assert (parcel.buffer, parcel.serial) == (buffer, buffer + 1)
            total, shape, found, mapped = _crossed(receiver, parcel)
            assert (total, shape, found) == (float(tensor.double().sum()), tuple(tensor.shape), dtype)
        assert mapped == 2
        outbox.end_step()


def test_a_tensor_that_outgrows_its_memory_gets_more(receiver: Connection) -> None:
    outbox = Outbox()
    serials = []
    for rows in (LARGE, LARGE * 40, LARGE * 41):
        parcel = outbox.send(torch.ones(rows))
        serials.append(parcel.serial)
        assert _crossed(receiver, parcel)[:2] == (float(rows), (rows,))
        outbox.end_step()
    assert serials == [1, 2, 2]


def _send(pipe: Connection) -> None:
    outbox = Outbox()
    pipe.send(outbox.send(torch.full((LARGE,), 2.0)))
    pipe.recv()  # until then its memory is there


def test_senders_are_told_apart() -> None:
    here, there = context().Pipe()
    process = context().Process(target=_send, args=(there,), daemon=True)
    process.start()
    outbox, inbox = Outbox(), Inbox()
    parcels = [outbox.send(torch.ones(LARGE)), here.recv()]
    assert [(parcel.serial, parcel.buffer) for parcel in parcels] == [(1, 0)] * 2
    assert [float(inbox.open(parcel).mean()) for parcel in parcels] == [1.0, 2.0]
    here.send(None)
    process.join(30)
    assert process.exitcode == 0


def test_slices_and_transposes_cross_as_they_look(receiver: Connection) -> None:
    whole = torch.arange(4.0 * LARGE).view(LARGE, 4)
    parcel = Outbox().send(whole[:, 1:3])
    assert _crossed(receiver, parcel)[:2] == (float(whole[:, 1:3].double().sum()), (LARGE, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_every_element_comes_where_it_was(dtype: torch.dtype) -> None:
    """Sums and shapes would not tell rows in another order."""
    numbers = torch.arange(6 * LARGE, dtype=torch.float64).remainder(251).view(2 * LARGE, 3).to(dtype)
    outbox, inbox = Outbox(), Inbox()
    for tensor in (numbers, numbers[1:-1, 1:], numbers.T, numbers[:, 0]):
        found = inbox.open(outbox.send(tensor))
        assert found.dtype == dtype and torch.equal(found, tensor)


def test_all_tensors_of_a_step_lie_apart_until_it_ends() -> None:
    """With `vision_ahead` and several replicas a rank sends many before the first is read."""
    outbox, inbox = Outbox(), Inbox()
    for step in range(2):
        tensors = [torch.arange(LARGE) + 1000 * step + number for number in range(7)]
        parcels = [outbox.send(tensor) for tensor in tensors]
        assert [parcel.buffer for parcel in parcels] == list(range(7))
        assert all(torch.equal(inbox.open(p), t) for p, t in zip(parcels, tensors, strict=True))
        outbox.end_step()


def test_more_memory_is_taken_than_is_needed_and_never_less() -> None:
    outbox = Outbox()
    for nbytes in (PAGE - 1, PAGE, PAGE + 1, 3 * PAGE):
        parcel = outbox.send(torch.ones(nbytes, dtype=torch.uint8))
        assert parcel.capacity % PAGE == 0 and parcel.capacity >= nbytes * 5 // 4
    exact = parcel.capacity
    outbox.end_step()
    for _ in range(3):
        outbox.send(torch.ones(PAGE, dtype=torch.uint8))
    assert outbox.send(torch.ones(exact, dtype=torch.uint8)).serial == 4  # as large as the memory: it fits


def test_the_smallest_that_goes_through_memory() -> None:
    assert isinstance(Outbox().send(torch.ones(SMALLEST_BYTES, dtype=torch.uint8)), Parcel)
    assert isinstance(Outbox().send(torch.ones(SMALLEST_BYTES - 1, dtype=torch.uint8)), Tensor)


def test_small_tensors_and_other_values_travel_as_they_are() -> None:
    small = torch.ones(3)
    assert Outbox().send(small) is small
    assert Inbox().open("text") == "text"


def test_the_sender_keeps_what_it_sends_until_the_step_ends() -> None:
    outbox = Outbox()
    first, second = outbox.send(torch.full((LARGE,), 1.0)), outbox.send(torch.full((LARGE,), 2.0))
    inbox = Inbox()
    assert [float(inbox.open(parcel)[0]) for parcel in (first, second)] == [1.0, 2.0]
    outbox.end_step()
    third = outbox.send(torch.full((LARGE,), 3.0))
    assert (third.buffer, third.descriptor) == (first.buffer, first.descriptor)
    assert float(inbox.open(third)[0]) == 3.0


def test_received_tensors_can_be_leaves() -> None:
    parcel = Outbox().send(torch.ones(LARGE))
    leaf = Inbox().open(parcel).requires_grad_()
    (leaf * 2).sum().backward()
    assert float(leaf.grad.sum()) == 2.0 * LARGE


def test_memory_that_cannot_be_reached_is_an_error_that_says_what_to_do() -> None:
    parcel = Outbox().send(torch.ones(LARGE))
    with pytest.raises(PartFailed, match="cluster.transport=object_store"):
        Inbox().open(replace(parcel, descriptor=9999, pid=os.getpid()))


@pytest.mark.parametrize(
    ("asked", "nodes", "gpus", "per_gpu", "chosen"),
    [
        ("auto", 1, 0, 0, "shared_memory"),
        ("auto", 1, 8, 2, "shared_memory"),
        ("auto", 1, 1, 4, "cuda_ipc"),
        ("auto", 1, 8, 1, "nccl"),
        ("auto", 2, 16, 1, "nccl"),
        ("auto", 2, 2, 2, "object_store"),
        ("auto", 2, 0, 0, "object_store"),
        ("object_store", 1, 0, 0, "object_store"),
        ("cuda_ipc", 1, 1, 1, "cuda_ipc"),
        ("nccl", 2, 0, 0, "nccl"),
    ],
)
def test_the_transport_follows_from_where_the_actors_are(
    asked: str, nodes: int, gpus: int, per_gpu: int, chosen: str
) -> None:
    assert choose_transport(asked, "a, b", nodes, gpus, per_gpu) == chosen


def test_passes_over_several_micro_batches_do_not_go_by_nccl_between_gpus() -> None:
    assert choose_transport("auto", "a", 1, 8, 1, passes=True) == "shared_memory"
    assert choose_transport("auto", "a, b", 2, 16, 1, passes=True) == "object_store"
    assert choose_transport("auto", "a", 1, 1, 2, passes=True) == "cuda_ipc"
    assert choose_transport("nccl", "a", 1, 0, 0, passes=True) == "nccl"  # by gloo
    with pytest.raises(ConfigError, match="nccl with training.vision_batch above 1"):
        choose_transport("nccl", "a", 1, 8, 1, passes=True)


@pytest.mark.parametrize(
    ("asked", "nodes", "gpus", "told"),
    [
        ("shared_memory", 2, 0, "the actors lie on 2 nodes, a, b; set cluster.transport=auto"),
        ("cuda_ipc", 1, 2, "the actors use 2 GPUs on 1 nodes"),
        ("cuda_ipc", 1, 0, "the actors use 0 GPUs"),
        ("nccl", 1, 1, "2 ranks of one group share a GPU, and NCCL does not connect these"),
    ],
)
def test_a_transport_that_cannot_reach_all_actors_is_refused(asked: str, nodes: int, gpus: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        choose_transport(asked, "a, b", nodes, gpus, 2)


class _Driver:
    """What is asked of the CUDA driver, and its answers."""

    def __init__(self, refuses: bool):
        self.refuses, self.locked, self.waits = refuses, {}, 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.refuses:
            self.locked[address] = nbytes
        return int(self.refuses)

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def synchronize(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("refuses", [False, True])
def test_memory_is_locked_once_and_waited_for_once_a_call(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver(refuses)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: driver)
    forgotten: list[bool] = []
    monkeypatch.setattr("dhp.cluster.transport.shared_memory._forget_error", lambda: forgotten.append(True))
    outbox, inbox = Outbox(pinned=True), Inbox(pinned=True)
    small, large = torch.randn(2, 40_000), torch.randn(8_000_000)
    for _ in range(2):
        for parcel in [outbox.send(row) for row in small]:
            inbox.open(parcel)
        outbox.flush()
        outbox.flush()  # nothing is under way any more
        outbox.end_step()
    assert len(driver.locked) == (0 if refuses else 4)  # two tensors a step, on both sides
    assert driver.waits == (0 if refuses else 2)
    grown = outbox.send(large)  # needs larger memory: the old one is let go on both sides
    assert torch.equal(inbox.open(grown), large)
    outbox.flush()
    assert len(driver.locked) == (0 if refuses else 4)
    assert len(forgotten) == (6 if refuses else 0)  # or the next kernel would be blamed for each refusal
    assert take_refusals() == ((REFUSED,) if refuses else ()) and take_refusals() == ()  # said once, in the report


def test_copies_into_locked_memory_do_not_hold_the_host_up(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, seen = _Driver(False), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: driver)
    own = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, other, non_blocking=False: (seen.append(non_blocking), own(self, other))[1]
    )
    Outbox(pinned=True).send(torch.randn(40_000))
    Outbox().send(torch.randn(40_000))
    assert seen == [True, False]


class Event:
    """A CUDA event that processes share: its handle, and what is done to it."""

    done: ClassVar[list[str]] = []

    def __init__(self, interprocess: bool = False, handle: bytes = b"") -> None:
        self._handle = handle or f"event {len(self.done)}".encode()
        self.done.append("made")

    def ipc_handle(self) -> bytes:
        return self._handle

    def record(self) -> None:
        self.done.append("recorded")

    @classmethod
    def from_ipc_handle(cls, device: torch.device, handle: bytes) -> "Event":
        return cls(handle=handle)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Memory of a GPU that both ends map, on the host; what is done to events."""
    Event.done.clear()
    own, kept = torch.empty, {}

    def share(tensor: Tensor) -> tuple[Any, tuple[int]]:
        kept[id(tensor)] = tensor
        return kept.__getitem__, (id(tensor),)

    monkeypatch.setattr(device_memory, "reduce_tensor", share)
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **more: own(*shape, **more))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", nullcontext)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    stream = SimpleNamespace(wait_event=lambda event: Event.done.append(f"waited for {event.ipc_handle().decode()}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return Event.done


def test_on_one_gpu_each_tensor_of_a_step_has_memory_that_is_mapped_once(one_gpu: list[str]) -> None:
    outbox, inbox, own = Outbox(on_device=True), Inbox(), {}
    for step in range(3):
        for number in range(2):
            sent = torch.full((3, 10_000), 10.0 * step + number)
            found = inbox.open(outbox.send(sent))
            assert torch.equal(found, sent) and found.data_ptr() != sent.data_ptr()
            assert own.setdefault(number, found.data_ptr()) == found.data_ptr()
        outbox.flush()
        outbox.end_step()
    assert len(set(own.values())) == 2 and one_gpu.count("made") == 4  # an event a buffer, at each end
    assert one_gpu[1:4:2] == ["recorded", "waited for event 0"]  # a receiver waits on the device, behind the copy
    assert one_gpu.count("recorded") == sum(one.startswith("waited") for one in one_gpu) == 6


def test_memory_that_a_pool_does_not_find_is_given_back_by_others(
    one_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch looks for none of it while a pool is used (pytorch #159674)."""
    own, given_back = torch.empty, []

    def empty(*shape: int, **more: Any) -> Tensor:
        if not given_back:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(*shape, **more)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(1))
    sent = torch.full((LARGE,), 3.0)
    assert torch.equal(Inbox().open(Outbox(on_device=True).send(sent)), sent) and given_back == [1]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    given_back.clear()
    with pytest.raises(torch.OutOfMemoryError):
        Outbox(on_device=True).send(sent)


def test_on_one_gpu_a_larger_tensor_has_other_memory_and_a_smaller_one_the_same(one_gpu: list[str]) -> None:
    outbox, inbox, found = Outbox(on_device=True), Inbox(), []
    for rows in (40_000, 45_000, 2_000_000):  # a quarter more is taken than is needed, in whole pages
        sent = torch.arange(float(rows)).to(torch.float64)
        parcel = outbox.send(sent)
        assert torch.equal(inbox.open(parcel), sent)
        found.append(parcel.mapping.serial)
        outbox.end_step()
    assert found == [1, 1, 2]
    assert [one.serial for one in outbox._outgrown] == [1]  # receivers may map it still
