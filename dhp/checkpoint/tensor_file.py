"""Writes a safetensors file and its checksums in one pass over memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from dhp.checkpoint.shard_files import NO_SYNC
from dhp.core.reports import WrittenFile

_POLYNOMIAL = 0xEDB88320  # of crc32; the coefficient of x⁰ is the highest bit
_ONE = 1 << 31


def join(first: int, second: int, nbytes: int) -> int:
    """The crc32 of bytes with the crc32 `first`, and `nbytes` more with the crc32 `second`."""
    return _multiply(_shift(nbytes), first) ^ second


@lru_cache(maxsize=4096)  # tensors of one size are many
def _shift(nbytes: int) -> int:
    """x to the power of the bits of so many bytes."""
    found, power, count = _ONE, 1 << 23, nbytes  # x⁸
    while count:
        if count & 1:
            found = _multiply(power, found)
        power, count = _multiply(power, power), count >> 1
    return found


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials, reduced."""
    found = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            found ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found


# The format's names (https://github.com/huggingface/safetensors).
NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_CHUNK = 16 << 20  # bytes that are summed and written at a time: they are still in the processor's cache


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> tuple[WrittenFile, dict[str, int]]:
    """Write tensors of the host, down to the disk; the file, and the crc32 of each tensor's bytes. Raises OSError."""
    # By falling size of an element, which aligns each one; the header's end is aligned to 8 bytes by the format.
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, end = {}, 0
    for name in ordered:
        begin, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": NAMES[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    checksum, sums = crc32(head), {}
    with open(file, "wb", buffering=0) as opened:
        _write(opened.fileno(), memoryview(head))
        for name in ordered:
            own = 0
            values = _bytes(tensors[name])
            for begin in range(0, len(values), _CHUNK):
                chunk = values[begin : begin + _CHUNK]
                own = crc32(chunk, own)
                _write(opened.fileno(), chunk)
            sums[name], checksum = own, join(checksum, own, len(values))
        try:
            os.fsync(opened.fileno())
        except OSError as error:
            if error.errno not in NO_SYNC:
                raise
    return WrittenFile(file.name, len(head) + end, checksum), sums


def checksum_of(tensor: Tensor) -> int:
    """The crc32 of a tensor's bytes, as files have them."""
    return crc32(_bytes(tensor))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write(handle: int, content: memoryview) -> None:
    while content:  # a system call may write less than it is given, always so beyond 2 GiB
        content = content[os.write(handle, content) :]
