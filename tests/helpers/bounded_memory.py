"""A plugin of ranks: an allocator on a CPU that has so many bytes, or tells the most that were taken."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import dhp
from dhp.engine.stage import Measuring
from dhp.plan.cut.bmp import by_parameters

LIMIT, PEAK = "DHP_TEST_LIMIT_BYTES", "DHP_TEST_PEAK_FOLDER"


class Bounded(TorchDispatchMode):
    """Counts the storages that operations make, and raises as a GPU would where they are more than `limit`."""

    def __init__(self, limit: int | None):
        super().__init__()
        self._limit, self._live = limit, dict[int, tuple[StorageWeakRef, int]]()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs = {one.untyped_storage()._cdata for one in tree_flatten((args, kwargs))[0] if torch.is_tensor(one)}
        for one in tree_flatten(output)[0]:
            if torch.is_tensor(one) and (storage := one.untyped_storage())._cdata not in inputs:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: own for key, own in self._live.items() if not own[0].expired()}
        taken = sum(nbytes for _, nbytes in self._live.values())
        self.peak = max(self.peak, taken)
        if self._limit is not None and taken > self._limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {taken} of {self._limit} bytes")
        return output


_limit = os.environ.get(LIMIT)
_BOUNDED = Bounded(None if _limit is None else int(_limit))
_forward, _backward = Measuring.forward, Measuring.backward


def _note() -> None:
    if PEAK in os.environ:
        (Path(os.environ[PEAK]) / str(os.getpid())).write_text(str(_BOUNDED.peak))


def forward(self: Measuring, rows: int, micro_batch: int, compute: Callable[[], Any]) -> Any:
    with _BOUNDED:
        found = _forward(self, rows, micro_batch, compute)
    _note()
    return found


def backward(self: Measuring, micro_batch: int) -> AbstractContextManager[None]:
    stack = ExitStack()
    stack.enter_context(_backward(self, micro_batch))
    stack.enter_context(_BOUNDED)
    stack.callback(_note)
    return stack  # type: ignore[return-value]


if {LIMIT, PEAK} & os.environ.keys():  # in the processes of a run that asks for it, not in the tests' own
    Measuring.forward, Measuring.backward = forward, backward  # type: ignore[method-assign,assignment]
    torch.cuda.mem_get_info = lambda device=None: (0, int(_limit or 0))  # type: ignore[assignment]
    dhp.PARTITION_METHODS["bounded"] = by_parameters  # a plugin registers something
