"""The C library's heap of a process that trains on a CPU."""

from __future__ import annotations

import ctypes
import os

# <malloc.h> of glibc
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_NEVER = -1
_GROW_BYTES = 64 * 2**20
_CHOSEN = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Let this process keep what it frees for its next allocation, as PyTorch's allocator does on a GPU.

    By itself glibc gives large blocks back to the kernel at once and asks for them again a moment later; the page
    faults of that take up to half the time of an elementwise operation on a large tensor. The price is that the process
    stays as large as its largest step. False, and nothing changed, where the environment chooses an allocator or its
    settings (MALLOC_…, GLIBC_TUNABLES, LD_PRELOAD) or where the C library is not glibc.
    """
    if any(name.startswith(_CHOSEN) for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_TRIM_THRESHOLD, _NEVER), (_MMAP_MAX, 0), (_TOP_PAD, _GROW_BYTES))
    return all(library.mallopt(*setting) == 1 for setting in settings)
