"""All live storages of a process, counted as operations make them: an account of memory apart from autograd's.

A storage counts with its whole size from the operation that first returns it until its memory is freed, and once,
however many tensors share it. What a kernel takes inside for itself is not seen.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dhp.parallel.recompute.offload import leaving_out
from dhp.parallel.recompute.saved_tensors import plain_tensors

BEFORE = "before"  # the moment in which storages came that were there at first


class LiveStorages(TorchDispatchMode):
    """The count. bytes: now; peak: the most since `begin`, and peak_moment the `moment` that was set then. shared: at
    the peak, bytes by the moment in which their storages were made."""

    of_meta = False  # count tensors without memory, as if they had some, and no others

    def __init__(self, shares: bool = True) -> None:
        """shares: keep `shared`, which takes time at each new peak."""
        super().__init__()
        self._shares = shares
        self._sizes: dict[int, tuple[int, str]] = {}  # of live storages: bytes, and the moment in which each came
        self.bytes = self.peak = 0
        self.moment = self.peak_moment = BEFORE
        self.shared: Counter[str] = Counter()

    def add(self, values: Any) -> None:
        """Count the storages of all tensors inside."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                for tensor in plain_tensors(leaf):
                    self._add(tensor.untyped_storage())

    def add_present(self) -> None:
        """Count the storages of all tensors that Python knows."""
        gc.collect()
        self.add([one for one in gc.get_objects() if issubclass(type(one), Tensor)])

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count a tensor's storage."""
        for one in plain_tensors(tensor):
            key = one.untyped_storage()._cdata
            self._add(one.untyped_storage())
            self.bytes -= self._sizes[key][0]
            self._sizes[key] = 0, BEFORE

    def begin(self) -> None:
        """The peak begins at what is there now."""
        self.peak = 0
        self._look()

    @contextmanager
    def during(self, moment: str) -> Iterator[None]:
        """Name what happens in the block."""
        before, self.moment = self.moment, moment
        try:
            yield
        finally:
            self.moment = before

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self.add(found)
        self.after_operation()
        return found

    def after_operation(self) -> None:
        """Called behind each one."""

    def __enter__(self) -> LiveStorages:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resizing(self._resize)  # FSDP2 frees so what it gathered, past dispatch
        self._offloads = leaving_out(self.leave_out)
        self._offloads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)
        self._offloads.__exit__(*error)

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(resize)
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            if storage._cdata in self._sizes:
                before, moment = self._sizes[storage._cdata]
                self._sizes[storage._cdata] = storage.nbytes(), self.moment if storage.nbytes() > before else moment
                self.bytes += storage.nbytes() - before
                self._look()
            return found

        return resized

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or (storage.device.type == "meta") != self.of_meta:
            return
        self._sizes[key] = storage.nbytes(), self.moment
        weakref.finalize(storage, self._free, key).atexit = False
        self.bytes += storage.nbytes()
        self._look()

    def _look(self) -> None:
        if self.bytes > self.peak:
            self.peak, self.peak_moment = self.bytes, self.moment
            self.shared = Counter()
            for nbytes, moment in self._sizes.values() if self._shares else ():
                self.shared[moment] += nbytes

    def _free(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)[0]
