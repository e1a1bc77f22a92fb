"""A fake CUDA device: compile and load the guard, and watch what tensor operations would do on a real one.

Everything here runs in a process of its own (tests/fake_cuda/probe.py), since a loaded guard stays.
"""

from __future__ import annotations

import ctypes
import glob
import os
import subprocess
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

SOURCE = Path(__file__).with_name("guard.cpp")


def torch_root() -> Path:
    """Where torch lies, without importing it."""
    import importlib.util

    return Path(importlib.util.find_spec("torch").origin).parent


def compile_guard(folder: Path) -> Path:
    """The guard as a library in `folder`. Raises CalledProcessError when it does not compile."""
    root, library = torch_root(), folder / "libguard.so"
    command = ["g++", "-O1", "-shared", "-fPIC", "-std=c++20", f"-I{root}/include", str(SOURCE), "-o", str(library)]
    command += [f"-L{root}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def load_guard(library: Path) -> None:
    """Before torch is imported."""
    for name in ("libgomp", "libc10.so", "libtorch_cpu.so"):
        for file in glob.glob(f"{torch_root()}/lib/{name}*"):
            ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def make_watch() -> Any:
    """A dispatch mode that counts synchronisations by phase, kind and place. torch comes here, after the guard."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watch(TorchDispatchMode):
        """phase: what goes on now, set by whoever drives. syncs: how often the host waited, and where."""

        def __init__(self) -> None:
            super().__init__()
            self.phase = ""
            self.syncs: Counter[tuple[str, str, str]] = Counter()
            self.transfers: Counter[tuple[str, str]] = Counter()
            self.kernels: Counter[str] = Counter()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            kwargs = dict(kwargs or {}) | ({"pin_memory": False} if kwargs and "pin_memory" in kwargs else {})
            name = func._schema.name.split("::")[-1]
            tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            on_device = any(t.device.type == "cuda" for t in tensors)
            if not tensors and not str(kwargs.get("device", "")).startswith("cuda"):
                with unset_fake_temporarily():
                    return func(*args, **kwargs)
            if not on_device and not any(isinstance(t, FakeTensor) for t in tensors):
                if not str(kwargs.get("device", "")).startswith("cuda"):
                    with unset_fake_temporarily():
                        return func(*args, **kwargs)
            if name in ("_local_scalar_dense", "item"):
                return self._read(tensors[0])
            if name == "nonzero" and on_device:
                self._wait("nonzero")
                return torch.empty((max(1, tensors[0].numel() // 2), tensors[0].dim()), dtype=torch.long, device="cuda")
            if (
                name == "index"
                and on_device
                and any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1])
            ):
                self._wait("boolean index")
                mask = next(i for i in args[1] if isinstance(i, torch.Tensor))
                return args[0].new_empty((max(1, mask.numel() // 2), *args[0].shape[mask.dim() :]))
            result = func(*args, **kwargs)
            if on_device:
                self.kernels[self.phase] += 1
            if name in ("_to_copy", "copy_"):
                return self._copied(name, args, kwargs, result)
            return result

        def _read(self, tensor: Any) -> Any:
            if tensor.device.type == "cuda":
                self._wait("item")
            return True if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1

        def _copied(self, name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> Any:
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], result)
            if source.device.type == target.device.type:
                return result
            asynchronous = kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False)
            way = "to device" if target.device.type == "cuda" else "to host"
            self.transfers[self.phase, way] += 1
            if not asynchronous:
                self._wait(way)
            if way == "to host" and name == "_to_copy":
                with unset_fake_temporarily():
                    return torch.ones(tuple(target.shape), dtype=target.dtype)
            return result

        def _wait(self, kind: str) -> None:
            frames = [
                f for f in traceback.extract_stack() if "/torch/" not in f.filename and "fake_cuda" not in f.filename
            ]
            own = [f"{f.filename.split('site-packages/')[-1].split('/dhp/')[-1]}:{f.lineno}" for f in frames[-3:]]
            self.syncs[self.phase, kind, " < ".join(reversed(own))] += 1

    return Watch()


class _Stream:
    """Takes everything, and does nothing; a class, as annotations want it."""

    def __init__(self, *_: Any) -> None:
        self.wait_stream = self.wait_event = self.record_event = mock.MagicMock()


@contextmanager
def as_if_cuda() -> Iterator[None]:
    """The parts of torch.cuda that have no meaning without a device, quiet; host memory is pinned by saying so."""
    import torch
    from torch.utils import checkpoint

    nothing = {
        "max_memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "Stream": _Stream,
        "stream": lambda _: nullcontext(),
        "current_stream": _Stream,
    }
    kept = {name: getattr(torch.cuda, name) for name in nothing}
    states = checkpoint.get_device_states
    for name, value in nothing.items():
        setattr(torch.cuda, name, value)
    checkpoint.get_device_states = lambda *_: ([], [])
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.Tensor.is_pinned = lambda self, *_: False
    torch.Tensor.record_stream = lambda self, *_: None
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(torch.cuda, name, value)
        checkpoint.get_device_states = states
        del torch.Tensor.pin_memory, torch.Tensor.is_pinned, torch.Tensor.record_stream


os.environ.setdefault("LOCAL_RANK", "0")
