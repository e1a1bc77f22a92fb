"""Sends large tensors between a host's actors by mapped memory.

Ray's object store costs eight times as much for 64 MB (`python -m experiments.micro --only handoff`): fresh pages and
several messages for each object. Here a sender keeps its memory from step to step, so its pages stay mapped on both
sides, and only a `Parcel` of a few hundred bytes travels through Ray.

The memory is anonymous (memfd), reached by other processes through /proc: nothing has a name on disk or in /dev/shm,
and a killed process leaves nothing there.

From and to a GPU, that memory is locked once (`pin`), and copies run asynchronously until `flush`.

Where all actors share one GPU, CUDA IPC does the same in its memory (`device_memory.py`), by one copy there.
Between hosts, Ray's object store carries a tensor in several copies."""

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import ray
import torch
from torch import Tensor

from dhp.cluster.transport.device_memory import PAGE, DeviceMaps, DeviceParcel, DeviceSegment
from dhp.core.errors import PartFailed

REFUSED = (
    "host memory between the stages cannot be locked for a GPU (cudaHostRegister refuses, as some containers make it "
    "do): each hand-over waits for its copies. Allow locked memory (ulimit -l unlimited), or run outside of gVisor"
)
_refusals: set[str] = set()


def pin(memory: mmap.mmap) -> bool:
    """Lock mapped memory for this process's GPU; False where the driver refuses: transfers take the slow way then."""
    if int(torch.cuda.cudart().cudaHostRegister(_address(memory), len(memory), 0)) == 0:
        return True
    _refusals.add(REFUSED)
    _forget_error()
    return False


def take_refusals() -> tuple[str, ...]:
    """Notes for the user since the last time: for the rank's report of the step."""
    taken = tuple(_refusals)
    _refusals.clear()
    return taken


def unpin(memory: mmap.mmap) -> None:
    """Undo `pin`, when the GPU has done what is queued: the memory may go away then."""
    torch.cuda.current_stream().synchronize()
    torch.cuda.cudart().cudaHostUnregister(_address(memory))


def wait_for_transfers() -> None:
    """Wait until the GPU's writes into locked memory are done."""
    torch.cuda.current_stream().synchronize()


def _forget_error() -> None:
    """The driver keeps the refusal as its last error, which the next kernel, whatever it is, would be blamed for."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        pass


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


SMALLEST_BYTES = 64 << 10  # bytes; below, Ray sends a value inside the message that says it is ready


@dataclass(frozen=True)
class Parcel:
    """A tensor in another process's memory: where, and what it looks like."""

    pid: int
    descriptor: int
    serial: int  # of the memory among all that the sender ever took; a descriptor is used again
    buffer: int  # which of the sender's buffers: it has one for each tensor of a step
    capacity: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Segment:
    """Memory for one tensor a step, taken once. pinned: locked for the GPU, if the driver lets it be."""

    waits = True  # a receiver reads it when it has the parcel

    def __init__(self, serial: int, buffer: int, nbytes: int, pinned: bool = False):
        self.serial, self._buffer = serial, buffer
        self.capacity = -(-nbytes // PAGE) * PAGE
        self.descriptor = os.memfd_create("dhp", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self.capacity)
        self._memory = _map(self.descriptor, self.capacity)
        self.pinned = pinned and pin(self._memory)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return _tensor_in(self._memory, shape, dtype)

    def parcel(self, shape: tuple[int, ...], dtype: torch.dtype) -> Parcel:
        return Parcel(os.getpid(), self.descriptor, self.serial, self._buffer, self.capacity, shape, dtype)

    def close(self) -> None:
        if self.pinned:
            unpin(self._memory)
        os.close(self.descriptor)  # what is mapped, here and in receivers, stays until it is dropped


class Outbox:
    """The tensors that this process sends in a step.

    A step's n-th tensor goes where the n-th of the step before was. That is safe without any acknowledgement: a part's
    next step begins after its own optimizer step, which needs the gradient norm of every other part, which each part
    answers after it has used all it received."""

    def __init__(self, on_device: bool = False, pinned: bool = False) -> None:
        """on_device: all receivers share this process's GPU. pinned: tensors come from a GPU, so lock memory for it."""
        self._segments: list[_Segment | DeviceSegment] = []
        self._outgrown: list[DeviceSegment] = []
        self._under_way = False
        self._used = self._serial = 0
        self._take = DeviceSegment if on_device else partial(_Segment, pinned=pinned)

    def send(self, tensor: Tensor) -> Parcel | DeviceParcel | Tensor:
        """Copy `tensor` where others can map it; small ones are returned as they are. Device tensors are copied once,
        to host memory that is already the shared one, or to memory of the device that receivers map."""
        if tensor.nbytes < SMALLEST_BYTES:
            return tensor.cpu()
        buffer, self._used = self._used, self._used + 1
        segment = self._segment(buffer, tensor.nbytes)
        shape = tuple(tensor.shape)
        segment.tensor(shape, tensor.dtype).copy_(tensor, non_blocking=segment.pinned)
        self._under_way |= segment.pinned and segment.waits
        return segment.parcel(shape, tensor.dtype)

    def flush(self) -> None:
        """Wait until all that was sent can be read; called before the receivers get its addresses."""
        if self._under_way:
            wait_for_transfers()
            self._under_way = False

    def end_step(self) -> None:
        """End the step: all that was sent has been used, so its memory may be written again."""
        self._used = 0

    def _segment(self, buffer: int, nbytes: int) -> _Segment | DeviceSegment:
        if buffer == len(self._segments) or self._segments[buffer].capacity < nbytes:
            self._serial += 1
            # A quarter more than needed: steps differ in size, and memory that is exactly right is soon too small.
            fresh = self._take(self._serial, buffer, nbytes + nbytes // 4)
            for old in self._segments[buffer : buffer + 1]:
                if isinstance(old, DeviceSegment):
                    # CUDA does not say what becomes of memory that goes while others map it.
                    self._outgrown.append(old)
                else:
                    old.close()
            self._segments[buffer : buffer + 1] = [fresh]
        return self._segments[buffer]


class Inbox:
    """The tensors that other processes have sent, each sender's memory mapped once."""

    def __init__(self, pinned: bool = False) -> None:
        """pinned: what is received goes to a GPU, so lock the memory for it."""
        self._mapped: dict[tuple[int, int], tuple[int, mmap.mmap, bool]] = {}
        self._pinned, self._on_device = pinned, DeviceMaps()

    def open(self, value: Any) -> Any:
        """The tensor of a parcel, in place; anything else as it is. It must not be written to, nor read after the
        step. Raises PartFailed when the sender's memory cannot be reached."""
        if isinstance(value, DeviceParcel):
            return self._on_device.open(value)
        if not isinstance(value, Parcel):
            return value
        serial, memory, locked = self._mapped.get((value.pid, value.buffer), (0, None, False))
        if memory is None or serial != value.serial:
            if memory is not None and locked:
                unpin(memory)
            memory = _map_of(value)
            self._mapped[value.pid, value.buffer] = (value.serial, memory, self._pinned and pin(memory))
        return _tensor_in(memory, value.shape, value.dtype)


def available() -> bool:
    """Whether this system has what the shared memory needs (Linux)."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


def _map_of(parcel: Parcel) -> mmap.mmap:
    path = f"/proc/{parcel.pid}/fd/{parcel.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise PartFailed(
            f"memory of process {parcel.pid} cannot be mapped ({path}: {error.strerror}): the actors do not share a "
            "process namespace, or the sender is gone. Set cluster.transport=object_store"
        ) from error
    try:
        return _map(descriptor, parcel.capacity)
    finally:
        os.close(descriptor)


def _map(descriptor: int, nbytes: int) -> mmap.mmap:
    # Populated, so that no page fault falls into a step.
    return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _tensor_in(memory: mmap.mmap, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=torch.Size(shape).numel()).view(shape)


@dataclass(frozen=True)
class RemoteValue:
    """ref: of the value, which is there."""

    ref: Any

    def fetch(self) -> Any:
        """The value. Raises what Ray does where it is lost."""
        return ray.get(self.ref)


class Lookahead:
    """Values by the refs that name them. One thread fetches them one after another and puts their large tensors into
    page-locked memory, while the rank's own thread computes: copying releases the GIL."""

    def __init__(self, prepare: Callable[[Any], Any] | None = None):
        """prepare: what is done to each value; None: `pin_tensors`."""
        self._prepare = pin_tensors if prepare is None else prepare
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lookahead")
        self._begun: dict[Any, Future[Any]] = {}  # of the step that comes now
        self._coming: dict[Any, Future[Any]] = {}  # of the one after it

    def begin(self, refs: Sequence[Any]) -> None:
        """Fetch these in this order, as soon as each is there. They are of the next step, and those of the call before
        are taken from now on. What was begun before these and not taken is forgotten: the run went on without it."""
        self._begun, self._coming = self._coming, {ref: self._thread.submit(self._fetch, ref) for ref in refs}

    def take(self, elsewhere: RemoteValue) -> Any:
        """The value, waited for where it is under way, fetched here where it is not. Raises what fetching raised."""
        begun = self._begun.pop(elsewhere.ref, None) or self._coming.pop(elsewhere.ref, None)
        return _fetch(elsewhere) if begun is None else begun.result()

    def _fetch(self, ref: Any) -> Any:
        return self._prepare(_fetch(RemoteValue(ref)))


def _fetch(elsewhere: RemoteValue) -> Any:
    """The value; references to values of other processes are followed."""
    value = elsewhere.fetch()
    while isinstance(value, RemoteValue):
        value = value.fetch()
    return value


def pin_tensors(value: Any) -> Any:
    """A dataclass with its large tensors in page-locked memory; anything else as it is. Small ones travel together with
    others, from memory of their own."""
    if not is_dataclass(value) or isinstance(value, type):
        return value
    held = {field.name: getattr(value, field.name) for field in fields(value)}
    large = {name: one for name, one in held.items() if isinstance(one, Tensor) and one.nbytes >= SMALLEST_BYTES}
    return replace(value, **{name: tensor.pin_memory() for name, tensor in large.items()}) if large else value
