"""Records collectives, and checks on request that ranks agree.

A rank's sequence of collectives must be a function of the layout and of the step's plan, never of the rank's own data.
Where it is not, ranks wait for one another for ever, or, where two calls happen to be of one size, train on numbers of
one another. `check_calls` holds the rule while a run goes on: before a collective begins, the ranks of its group
exchange a description of it, and one that differs is an error. torch's own check (TORCH_DISTRIBUTED_DEBUG=DETAIL)
compares operations and shapes alone; here the calling function and its layer are compared too."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store, get_process_group_ranks

from dhp.core.errors import PartFailed
from dhp.core.tracing import add_waited

CALLERS = 3  # functions on the stack that name a call's origin, the innermost first
_KEPT = 64  # calls of a group that stay in the store: no rank is further behind
# Whose functions name the origin; this file's and those of the kernel in front of each collective do not.
_ORIGINS = ("/dhp/", "/_fully_shard/", "/deepspeed/runtime/")
_NO_ORIGIN = ("/core/collectives.py", "/parallel/traffic.py")
_MESSAGES = {"send", "recv_"}  # between two ranks of a group: the others have no part in them
_UNEVEN = {"alltoall_base_", "alltoall_"}  # whose ranks may send and receive differing numbers of rows


@dataclass(frozen=True)
class Collective:
    """A collective, or a message between two ranks of a group, as this rank begins it. number: of the group's
    collectives so far. tensors: type and shape of each. members: which of the stage's ranks are in the group; none: not
    known."""

    group: str
    ranks: int
    number: int
    operation: str
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    members: tuple[int, ...] = ()

    def __str__(self) -> str:
        shapes = [tuple("*" if own < 0 else own for own in shape) for _, shape in self.tensors]
        kinds = [str(dtype).removeprefix("torch.") for dtype, _ in self.tensors]
        tensors = ", ".join(f"{kind}[{', '.join(map(str, shape))}]" for kind, shape in zip(kinds, shapes))
        return f"{self.operation}({tensors}), call {self.number} in group {self.group} of {self.ranks} ranks"


class CallRecord:
    """The calls of one process."""

    def __init__(self) -> None:
        self.last: Collective | None = None
        self.held_since: float | None = None  # by the clock `time.monotonic`: since when a collective holds the process
        self.last_begun = 0.0  # when the last call began, by the same clock
        self._depth = 0
        self._members: dict[str, tuple[int, ...]] = {}  # by group
        self._numbers: Counter[str] = Counter()  # by group, without messages, which no two ranks need make alike
        self._store: Store | None = None
        self._timeout = timedelta(0)
        self._layer = ""

    @property
    def numbers(self) -> dict[str, int]:
        """Collectives that this process began, by group. May be read from another thread."""
        return dict(self._numbers)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around what returns when other ranks have done their share: the seconds are added to `dhp.core.tracing`.
        Blocks may lie within one another."""
        self._depth += 1
        begun = time.monotonic()
        if self._depth == 1:
            self.held_since = begun
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.held_since = None
                add_waited(time.monotonic() - begun)

    @property
    def checks(self) -> bool:
        """Whether ranks agree on each call before it begins."""
        return self._store is not None

    def check(self, store: Store, timeout_s: float) -> None:
        """From now on, compare each call with the other ranks'. Collective: all ranks, before their next collective."""
        self._store, self._timeout = store, timedelta(seconds=timeout_s)

    def note(self, operation: str, group: ProcessGroup, arguments: Sequence[Any]) -> None:
        """Record a call that is about to begin. Where calls are checked, raises PartFailed if another rank makes
        another one, or none within the time-out."""
        name, together = group.group_name, operation not in _MESSAGES
        self._numbers[name] += together
        rows = (-1,) if operation in _UNEVEN else ()
        tensors = tuple((one.dtype, (*rows, *one.shape[len(rows) :])) for one in _tensors(arguments[:2]))
        if name not in self._members:
            self._members[name] = _members_of(group)
        self.last = Collective(name, group.size(), self._numbers[name], operation, tensors, self._members[name])
        self.last_begun = time.monotonic()
        if self._store is not None and together:
            self._agree(group.rank(), self.last, f"{self.last} by {' < '.join(_find_origin()) or 'torch'}{self._layer}")

    @contextmanager
    def in_layer(self, name: str) -> Iterator[None]:
        """Attribute the calls inside to a layer."""
        before, self._layer = self._layer, f" in {name}"
        try:
            yield
        finally:
            self._layer = before

    def go_back_through(self, name: str) -> None:
        """Attribute the following calls to a layer that backward has reached."""
        self._layer = f" in the backward of {name}"

    def _agree(self, rank: int, call: Collective, own: str) -> None:
        store, key = self._store, f"calls/{call.group}/{call.number}"
        assert store is not None
        keys = [f"{key}/{other}" for other in range(call.ranks)]
        store.set(keys[rank], own)
        try:
            store.wait(keys, self._timeout)
        except RuntimeError:  # raised by a store at its time-out
            raise PartFailed(
                f"rank {rank} waits in {own}; {self._missing(keys)}. A rank's collectives must not depend on its own "
                "data: see the last call of each rank"
            ) from None
        for other, key in enumerate(keys):
            theirs = store.get(key).decode()
            if theirs != own:
                raise PartFailed(
                    f"ranks of one group make different collectives: rank {rank} makes {own}, but rank {other} makes "
                    f"{theirs}. A rank's collectives must not depend on its own data: please report this layout"
                )
        if call.number > _KEPT:
            store.delete_key(f"calls/{call.group}/{call.number - _KEPT}/{rank}")

    def _missing(self, keys: Sequence[str]) -> str:
        assert self._store is not None
        try:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError:
            return "and the store in which ranks meet is gone: its rank has ended"
        return f"ranks {missing} of its group did not make that call within {self._timeout.total_seconds():g} s"


RECORD = CallRecord()


def _members_of(group: ProcessGroup) -> tuple[int, ...]:
    try:
        return tuple(get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):  # a group that torch made for itself
        return ()


def watch_layers(layers: Mapping[str, nn.Module], record: CallRecord = RECORD) -> None:
    """Name these layers in calls that begin in their forward, or in a backward from their output on."""
    for name, layer in layers.items():
        layer.forward = _named(layer.forward, name, record)


def _named(forward: Callable[..., Any], name: str, record: CallRecord) -> Callable[..., Any]:
    @wraps(forward)
    def run(*arguments: Any, **named: Any) -> Any:
        with record.in_layer(name):
            output = forward(*arguments, **named)
        for tensor in _tensors(output if isinstance(output, tuple) else (output,)):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: record.go_back_through(name))
        return output

    return run


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _find_origin() -> list[str]:
    """The functions that began the current call, with the module that a sharding library works on."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(found) < CALLERS:
        file = frame.f_code.co_filename
        if any(part in file for part in _ORIGINS) and not file.endswith(_NO_ORIGIN):
            found.append(frame.f_code.co_qualname + _find_module(frame.f_locals))
        frame = frame.f_back
    return found


def _find_module(names: Mapping[str, Any]) -> str:
    """The module that a function of FSDP2 or of DeepSpeed's stage 3 gathers or reduces."""
    path = getattr(names.get("self"), "_module_fqn", None)
    if path is not None:
        return f"[{path}]"
    module = names.get("current_submodule", names.get("sub_module"))
    return f"[{type(module).__name__} {module.ds_id}]" if hasattr(module, "ds_id") else ""
