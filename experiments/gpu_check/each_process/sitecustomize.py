"""In each process of a run of the check: names that an older torch lacks, before dhp asks for them."""

import sys
from importlib.machinery import ModuleSpec
from typing import Any


class _Before:
    """Asked for modules first; finds none."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "dhp.parallel":  # the first that needs them; processes without it need not import torch
            sys.meta_path.remove(self)
            import experiments.gpu_check.stand_ins  # noqa: F401
        return None


sys.meta_path.insert(0, _Before())
