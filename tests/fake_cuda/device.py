"""A fake CUDA device: compile and load the guard, before torch is imported, and quiet what asks a device.

A loaded guard stays, so whoever needs it works in a process of its own."""

import ctypes
import glob
import importlib.util
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

SOURCE = Path(__file__).with_name("guard.cpp")


def torch_root() -> Path:
    """Where torch lies, without importing it."""
    return Path(importlib.util.find_spec("torch").origin).parent


def compile_guard(folder: Path) -> Path:
    """The guard as a library in `folder`. Raises CalledProcessError when it does not compile, FileNotFoundError where
    there is no g++."""
    root, library = torch_root(), folder / "libguard.so"
    command = ["g++", "-O1", "-shared", "-fPIC", "-std=c++20", f"-I{root}/include", str(SOURCE), "-o", str(library)]
    command += [f"-L{root}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def load_guard(library: Path) -> None:
    """Before torch is imported."""
    os.environ.setdefault("LOCAL_RANK", "0")
    for name in ("libgomp", "libc10.so", "libtorch_cpu.so"):
        for file in glob.glob(f"{torch_root()}/lib/{name}*"):
            ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class _Nothing:
    """A stream or an event: takes everything and does nothing. A class, as annotations want it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.wait_stream = self.wait_event = self.record_event = self.record = self.wait = mock.MagicMock()
        self.query = lambda: True


@contextmanager
def as_if_cuda() -> Iterator[None]:
    """The parts of torch.cuda that have no meaning without a device, quiet; host memory is pinned by saying so."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils import checkpoint

    nothing = {
        "max_memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "Stream": _Nothing,
        "Event": _Nothing,
        "stream": lambda _: nullcontext(),
        "current_stream": _Nothing,
    }
    kept = {name: getattr(torch.cuda, name) for name in nothing}
    states, to_list = checkpoint.get_device_states, FakeTensor.tolist
    for name, value in nothing.items():
        setattr(torch.cuda, name, value)
    checkpoint.get_device_states = lambda *_: ([], [])
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.Tensor.is_pinned = lambda self, *_: False
    torch.Tensor.record_stream = lambda self, *_: None
    FakeTensor.tolist = lambda self: self.cpu().numpy().tolist()  # in one transfer; its own asks for each element
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(torch.cuda, name, value)
        checkpoint.get_device_states = states
        FakeTensor.tolist = to_list
        del torch.Tensor.pin_memory, torch.Tensor.is_pinned, torch.Tensor.record_stream
