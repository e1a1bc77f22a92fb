"""Sends large tensors directly from one process's memory to another's, host or device, on any host: NIXL.

The sender's memory is registered once and stays from step to step; only a `Region` of a few hundred bytes travels
through Ray, and the receiver reads the tensor itself: over RDMA or NVLink where there is any, else over TCP. The
package is optional (`pip install nixl`) and is imported where this transport is asked for.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dhp.base.errors import ConfigError, PartFailed
from dhp.cluster.transport.shared_memory import SMALLEST_BYTES

BACKEND = "UCX"
EAGER_POLLS, PAUSE_S = 200, 50e-6  # a wait first spins, then leaves the core to others


@dataclass(frozen=True)
class Region:
    """A tensor in another process's registered memory.

    metadata: how to reach that process. version: of the metadata. buffer: which of the sender's buffers it is in.
    """

    agent: str
    metadata: bytes
    version: int
    descriptors: bytes
    buffer: int
    device: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Memory:
    """Registered memory, in bytes, that grows when it must."""

    def __init__(self, agent: Any, nbytes: int, device: str):
        # A quarter more than needed: steps differ in size, and to register memory takes long.
        self.bytes = torch.empty(nbytes + nbytes // 4, dtype=torch.uint8, device=device)
        if self.bytes.is_cuda:  # kernels that are queued may still use memory that was freed, and NIXL waits for none
            torch.cuda.current_stream().synchronize()
        self._agent, self._registration = agent, agent.register_memory([self.bytes])

    def close(self) -> None:
        self._agent.deregister_memory(self._registration)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.bytes[: _nbytes(shape, dtype)].view(dtype).view(shape)

    def descriptors(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """What a transfer of such a tensor reads or fills."""
        return self._agent.get_xfer_descs([self.bytes[: _nbytes(shape, dtype)]])


class Exchange:
    """One process's sending and receiving.

    A step's n-th tensor goes where the n-th of the step before was, on both sides;
    `dhp.cluster.transport.shared_memory.Outbox` says why that is safe.
    """

    def __init__(self, loopback: bool, timeout_s: float):
        """loopback: nothing listens beyond this host. timeout_s: of one transfer. Raises ConfigError without NIXL."""
        if loopback:
            os.environ["UCX_NET_DEVICES"] = "lo"
        self._agent = _make_agent()
        self._timeout_s = timeout_s
        self._sending: list[_Memory] = []
        self._receiving: dict[tuple[str, int], _Memory] = {}
        self._known: dict[str, int] = {}  # versions of other processes' metadata
        self._used = self._version = 0

    def send(self, tensor: Tensor) -> Region | Tensor:
        """Copy `tensor` to where others can read it until `end_step`; small ones are returned as they are."""
        if tensor.nbytes < SMALLEST_BYTES:
            return tensor.cpu()
        buffer, self._used = self._used, self._used + 1
        memory = self._memory_for(buffer, tensor)
        shape = tuple(tensor.shape)
        memory.tensor(shape, tensor.dtype).copy_(tensor)
        if tensor.is_cuda:
            torch.cuda.current_stream().synchronize()  # the receiver reads past the stream
        serialized = self._agent.get_serialized_descs(memory.descriptors(shape, tensor.dtype))
        metadata = self._agent.get_agent_metadata()
        return Region(
            self._agent.name, metadata, self._version, serialized, buffer, tensor.device.type, shape, tensor.dtype
        )

    def open(self, value: Any) -> Any:
        """The tensor of a region, to be read until the step ends; anything else as it is. Raises PartFailed when it
        does not come."""
        return self._read(value) if isinstance(value, Region) else value

    def end_step(self) -> None:
        """End the step: all that was sent has been used, so its memory may be written again."""
        self._used = 0

    def _read(self, region: Region) -> Tensor:
        try:
            self._meet(region)
            memory = self._buffer_for(region)
            target = memory.descriptors(region.shape, region.dtype)
            source = self._agent.deserialize_descs(region.descriptors)
            handle = self._agent.initialize_xfer("READ", target, source, region.agent, "")
            try:
                self._wait(handle)
            finally:
                self._agent.release_xfer_handle(handle)
        except Exception as error:  # NIXL has a dozen kinds, of a package that need not be there
            raise PartFailed(
                f"a tensor of {_nbytes(region.shape, region.dtype)} bytes did not come from {region.agent} ({error}): "
                f"its process is gone, or {BACKEND} cannot reach it. UCX_LOG_LEVEL=info says what was tried; "
                "cluster.transport=object_store goes another way"
            ) from error
        return memory.tensor(region.shape, region.dtype)

    def _memory_for(self, buffer: int, tensor: Tensor) -> _Memory:
        held = self._sending[buffer : buffer + 1]
        if not held or held[0].bytes.nbytes < tensor.nbytes or held[0].bytes.device != tensor.device:
            for memory in held:
                memory.close()
            self._sending[buffer : buffer + 1] = [_Memory(self._agent, tensor.nbytes, str(tensor.device))]
            self._version += 1
        return self._sending[buffer]

    def _buffer_for(self, region: Region) -> _Memory:
        key, nbytes = (region.agent, region.buffer), _nbytes(region.shape, region.dtype)
        memory = self._receiving.get(key)
        if memory is None or memory.bytes.nbytes < nbytes or memory.bytes.device.type != region.device:
            if memory is not None:
                memory.close()
            memory = self._receiving[key] = _Memory(self._agent, nbytes, region.device)
        return memory

    def _meet(self, region: Region) -> None:
        """Read the sender's metadata, if its registered memory has changed."""
        known = self._known.get(region.agent)
        if known is not None and known >= region.version:  # what was registered for this step stays until its end
            return
        if known is not None:
            self._agent.remove_remote_agent(region.agent)
        self._agent.add_remote_agent(region.metadata)
        self._known[region.agent] = region.version

    def _wait(self, handle: Any) -> None:
        state, polls, until = self._agent.transfer(handle), 0, time.monotonic() + self._timeout_s
        while state == "PROC":
            polls += 1
            if polls > EAGER_POLLS:
                time.sleep(PAUSE_S)
            if time.monotonic() > until:
                raise TimeoutError(f"not within {self._timeout_s:g} s")
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise ConnectionError(f"the transfer ended in state {state}")


def _make_agent() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise ConfigError(
            f"cluster.transport=nixl needs the package nixl on every node ({error}): install it with "
            "`pip install nixl`, or set cluster.transport=auto"
        ) from error
    return nixl_agent(f"dhp-{uuid.uuid4()}", nixl_agent_config(backends=[BACKEND]))


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
