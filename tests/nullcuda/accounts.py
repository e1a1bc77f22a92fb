"""What processes took of null CUDA's devices: the file that runtime.c writes."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_SLOT = struct.Struct("2i7q")


class Account(NamedTuple):
    """One process on one device. bytes: now; peak: the most. launches: of kernels. calls: of libraries that
    launch their own. waits: of the host for the device.
    copies: between host and device, and on it. opened: handles of other processes' memory."""

    pid: int
    device: int
    bytes: int
    peak: int
    launches: int
    calls: int
    waits: int
    copies: int
    opened: int


def read_accounts(file: Path) -> Iterator[Account]:
    """Of all processes that took a context."""
    content = file.read_bytes()
    for at in range(0, len(content) // _SLOT.size * _SLOT.size, _SLOT.size):
        account = Account(*_SLOT.unpack_from(content, at))
        if account.pid:
            yield account
