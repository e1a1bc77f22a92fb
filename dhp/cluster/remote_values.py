"""Values that another actor holds, fetched where they are needed, the next step's ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import ray
from torch import Tensor

from dhp.cluster.transport.shared_memory import SMALLEST_BYTES


@dataclass(frozen=True)
class RemoteValue:
    """ref: of the value, which is there."""

    ref: Any

    def fetch(self) -> Any:
        """The value. Raises what Ray does where it is lost."""
        return ray.get(self.ref)


class Lookahead:
    """Values by the refs that name them. One thread fetches them one after another and puts their large tensors into
    page-locked memory, while the rank's own thread computes: copying releases the GIL."""

    def __init__(self, prepare: Callable[[Any], Any] | None = None):
        """prepare: what is done to each value; None: `pin_tensors`."""
        self._prepare = pin_tensors if prepare is None else prepare
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lookahead")
        self._begun: dict[Any, Future[Any]] = {}  # of the step that comes now
        self._coming: dict[Any, Future[Any]] = {}  # of the one after it

    def begin(self, refs: Sequence[Any]) -> None:
        """Fetch these in this order, as soon as each is there. They are of the next step, and those of the call before
        are taken from now on. What was begun before these and not taken is forgotten: the run went on without it."""
        self._begun, self._coming = self._coming, {ref: self._thread.submit(self._fetch, ref) for ref in refs}

    def take(self, elsewhere: RemoteValue) -> Any:
        """The value, waited for where it is under way, fetched here where it is not. Raises what fetching raised."""
        begun = self._begun.pop(elsewhere.ref, None) or self._coming.pop(elsewhere.ref, None)
        return _fetch(elsewhere) if begun is None else begun.result()

    def _fetch(self, ref: Any) -> Any:
        return self._prepare(_fetch(RemoteValue(ref)))


def _fetch(elsewhere: RemoteValue) -> Any:
    """The value; references to values of other processes are followed."""
    value = elsewhere.fetch()
    while isinstance(value, RemoteValue):
        value = value.fetch()
    return value


def pin_tensors(value: Any) -> Any:
    """A dataclass with its large tensors in page-locked memory; anything else as it is. Small ones travel together with
    others, from memory of their own."""
    if not is_dataclass(value) or isinstance(value, type):
        return value
    held = {field.name: getattr(value, field.name) for field in fields(value)}
    large = {name: one for name, one in held.items() if isinstance(one, Tensor) and one.nbytes >= SMALLEST_BYTES}
    return replace(value, **{name: tensor.pin_memory() for name, tensor in large.items()}) if large else value
