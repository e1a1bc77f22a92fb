"""GPU memory that other processes on the GPU map once, and tensors in it.

Such memory is taken from CUDA apart from all else: what is mapped elsewhere cannot expand, and what lies beside it is
held with it. All other memory expands, and is not cut into pieces that fit nothing."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from dhp.cluster.host import fixed_segments

PAGE = 1 << 21


@dataclass(frozen=True)
class DeviceMapping:
    """How another process on the GPU maps a sender's memory, and the event behind which it is written.

    serial: of the memory among all that the sender ever took. buffer: which of the sender's buffers."""

    pid: int
    serial: int
    buffer: int
    rebuild: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    event: bytes


@dataclass(frozen=True)
class DeviceParcel:
    """A tensor in another process's GPU memory: where, and what it looks like."""

    mapping: DeviceMapping
    shape: tuple[int, ...]
    dtype: torch.dtype


class DeviceSegment:
    """GPU memory for one tensor a step, taken once."""

    pinned = True  # copies into it are asynchronous
    waits = False  # receivers wait on the device, for the event

    def __init__(self, serial: int, buffer: int, nbytes: int) -> None:
        self.serial, self.capacity = serial, -(-nbytes // PAGE) * PAGE
        self._pool = torch.cuda.MemPool()  # of its own, so that nothing else ever has a place in what is mapped
        self._memory = _take(self.capacity, self._pool)
        self._event = torch.cuda.Event(interprocess=True)
        # Once: torch keeps a counter and an event for each time that memory is shared.
        rebuild, arguments = reduce_tensor(self._memory)
        self._mapping = DeviceMapping(os.getpid(), serial, buffer, rebuild, arguments, self._event.ipc_handle())

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return _tensor_in(self._memory, shape, dtype)

    def parcel(self, shape: tuple[int, ...], dtype: torch.dtype) -> DeviceParcel:
        """What is in it when all is done that is queued by now."""
        self._event.record()
        return DeviceParcel(self._mapping, shape, dtype)


class DeviceMaps:
    """What other processes have sent, each of their buffers mapped once."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int], tuple[int, Tensor, torch.cuda.Event]] = {}

    def open(self, parcel: DeviceParcel) -> Tensor:
        """The tensor, in place, for what this process queues from here on."""
        mapping = parcel.mapping
        key = mapping.pid, mapping.buffer
        serial, memory, event = self._mapped.get(key, (0, None, None))
        if memory is None or event is None or serial != mapping.serial:
            memory = mapping.rebuild(*mapping.arguments)
            event = torch.cuda.Event.from_ipc_handle(memory.device, mapping.event)
            self._mapped[key] = mapping.serial, memory, event
        torch.cuda.current_stream().wait_event(event)
        return _tensor_in(memory, parcel.shape, parcel.dtype)


def _take(nbytes: int, pool: Any) -> Tensor:
    """New memory. While a pool is used torch gives nothing back to CUDA that lies in others, and so may find no room
    beside memory that nothing uses: that is given back here."""
    try:
        return _take_once(nbytes, pool)
    except torch.OutOfMemoryError:
        pass
    torch.cuda.empty_cache()
    return _take_once(nbytes, pool)


def _take_once(nbytes: int, pool: Any) -> Tensor:
    with fixed_segments(), torch.cuda.use_mem_pool(pool):
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def _tensor_in(memory: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return memory[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
