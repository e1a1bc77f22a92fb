"""Compilers that stand in for torch's inductor."""

from collections.abc import Callable
from typing import Any

import torch

_compile = torch.compile


def compile_by(backend: Any) -> Callable[..., Any]:
    """torch.compile by another backend, which knows nothing of inductor's options."""

    def compiled(function: Callable[..., Any], options: Any = None, **settings: Any) -> Callable[..., Any]:
        return _compile(function, backend=backend, **settings)

    return compiled
