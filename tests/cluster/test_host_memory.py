"""Keeping freed memory: a large block that is freed and asked for again costs no page fault the second time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROBE = """
import ctypes, resource, sys
from dhp.cluster.host import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else False
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p

def touch(size=100 * 2**20):
    block = library.malloc(ctypes.c_size_t(size))
    ctypes.memset(block, 1, size)
    library.free(ctypes.c_void_p(block))

touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
FEW, MANY = 20, 40  # faults for 100 MB: 25,600 of 4 KB, but about 50 where the kernel gives pages of 2 MB unasked


def probe(asked: str, **environment: str) -> tuple[str, int]:
    """What keeping answered, and the page faults of a second block."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "LD_PRELOAD"))}
    command = [sys.executable, "-c", PROBE, asked]
    kept, faults = subprocess.run(
        command, capture_output=True, text=True, check=True, env=clean | environment
    ).stdout.split()
    return kept, int(faults)


def test_freed_memory_is_used_again():
    kept, faults = probe("keep")
    assert kept == "True" and faults < FEW


def test_by_itself_the_library_gives_it_back():
    """What keeping is for; should this fail, it is not needed any more."""
    assert probe("leave")[1] > MANY


@pytest.mark.parametrize("name, value", [("MALLOC_ARENA_MAX", "4"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=4")])
def test_an_environment_that_chooses_is_left_alone(name: str, value: str):
    kept, faults = probe("keep", **{name: value})
    assert kept == "False" and faults > MANY
