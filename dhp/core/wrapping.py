"""Replaces modules' forwards, and records who did; hooks of tensors."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

_WRAPPERS = "dhp_wrappers"  # on a module: who replaced its forward, in order


def wrap_forward(module: Any, forward: Callable[..., Any], by: str) -> None:
    """Let a module compute by `forward` from now on. by: the name of the file that does it."""
    module.forward = forward
    vars(module).setdefault(_WRAPPERS, []).append(by.removeprefix("dhp."))


def wrappers_of(model: Any) -> dict[tuple[str, str], int]:
    """How many modules of each class compute by a forward that was put there, by (class, who put it there)."""
    found: Counter[tuple[str, str]] = Counter()
    for module in model.modules():
        found.update((type(module).__name__, by) for by in vars(module).get(_WRAPPERS, ()))
    return dict(found)


def call_weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A hook of a parameter that calls `method` while the method's object lives.

    torch keeps a tensor's hooks where Python's collector does not look: one that held an object which holds the tensor
    would keep both for good."""
    held = WeakMethod(method)

    def call(*arguments: Any) -> None:
        method = held()
        if method is not None:
            method(*arguments)

    return call
