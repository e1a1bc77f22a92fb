"""In each process on null CUDA, as `sitecustomize`: modules of dhp are told that nothing computes, and counted."""

import os
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PATCHED = {
    # Proofs of kernels are taken as given.
    "dhp.parallel.kernels.elementwise": {
        "is_proved": lambda *_: True,
        # Only where it is asked for: it takes minutes.
        "can_compile": lambda: bool(os.environ.get("NULLCUDA_COMPILES")),
    },
    "dhp.cluster.transport.shared_memory": {"SMALLEST_BYTES": 1},  # every tensor takes the way of large ones
    # Weights that no kernel filled differ between ranks.
    "dhp.parallel.tensor.tensor_plan": {"require_alike": lambda *_: None},
}
EVEN = "dhp.parallel.expert.expert_shares"
COUNTED = {"dhp.cluster.worker", "dhp.cluster.cluster", "dhp.engine.stage"}  # by `tests.nullcuda.counted_ranks`


class _Patching(Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        vars(module).update(PATCHED.get(module.__name__, {}))
        if module.__name__ == "dhp.engine.stage":
            module.torch.backends.cudnn.enabled = False  # it answers with plans, which nobody has made
        if module.__name__ == EVEN:
            import_module("tests.nullcuda.even_visits").make_even(module)
        if module.__name__ in COUNTED:
            import_module("tests.nullcuda.counted_ranks").count(module)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in (EVEN, *PATCHED, *COUNTED) else None
        if spec is not None:
            spec.loader = _Patching(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
