"""What tensor operations would do on a real device: kernels, transfers, and where the host waits."""

import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HERE = tuple(str(Path(__file__).with_name(f"{name}.py")) for name in ("device", "drive", "stand_ins", "watch"))


class Watch(TorchDispatchMode):
    """Runs inside a FakeTensorMode. phase: what goes on now, set by whoever drives. syncs: how often the host waited,
    by phase, kind and place; transfers: copies between host and device, by phase and way; kernels: operations on the
    device, by phase, views included.

    read: what every integer is that the host reads from the device in a list; other values are 1."""

    def __init__(self, read: int = 1) -> None:
        super().__init__()
        self.phase, self.read = "", read
        self.syncs: Counter[tuple[str, str, str]] = Counter()
        self.transfers: Counter[tuple[str, str]] = Counter()
        self.kernels: Counter[str] = Counter()

    def ran(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """An operation on tensors of the device is done."""
        self.kernels[self.phase] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {}) | ({"pin_memory": False} if kwargs and "pin_memory" in kwargs else {})
        name = func._schema.name.split("::")[-1]
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        made_there = str(kwargs.get("device", "")).startswith("cuda")
        there = any(tensor.device.type == "cuda" for tensor in tensors)
        if not there and not made_there and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if name in ("_local_scalar_dense", "item"):
            return self._value(tensors[0])
        if there and name in ("nonzero", "index", "bincount"):
            found = self._of_unknown_size(name, args)
            if found is not None:
                return found
        result = func(*args, **kwargs)
        if there or made_there:
            self.ran(func, args, kwargs, result)
        return self._copied(name, args, kwargs, result) if name in ("_to_copy", "copy_") else result

    def _value(self, tensor: Tensor) -> Any:
        if tensor.device.type == "cuda":
            self._wait("item")
        return True if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1

    def _of_unknown_size(self, name: str, args: Sequence[Any]) -> Tensor | None:
        """The result of what a real device has to tell the host the size of, where this is such an operation: half of
        all elements; of bincount, as many as it is asked for."""
        if name == "bincount":
            self._wait("bincount")
            return torch.empty(args[2], dtype=torch.long, device="cuda")
        if name == "nonzero":
            self._wait("nonzero")
            return torch.empty((max(1, args[0].numel() // 2), args[0].dim()), dtype=torch.long, device="cuda")
        masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype == torch.bool]
        if not masks:
            return None
        self._wait("boolean index")
        return args[0].new_empty((max(1, masks[0].numel() // 2), *args[0].shape[masks[0].dim() :]))

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
                value = 1 if target.dtype.is_floating_point or target.dtype == torch.bool else self.read
                return torch.full(tuple(target.shape), value, dtype=target.dtype)
        return result

    def _wait(self, kind: str) -> None:
        frames = [
            f for f in traceback.extract_stack() if "/torch/" not in f.filename and not f.filename.startswith(HERE)
        ]
        own = [f"{f.filename.split('site-packages/')[-1].split('/dhp/')[-1]}:{f.lineno}" for f in frames[-3:]]
        self.syncs[self.phase, kind, " < ".join(reversed(own))] += 1
