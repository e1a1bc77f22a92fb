"""Counts and traces every collective of this process.

**Bytes** are counted where all of them pass: `torch.distributed`, DTensor's functional collectives and their backward
all end in the operators of c10d, so each of these gets a kernel in front of its own. BackendSelect is the place for it:
unlike autograd's keys it is never left out, neither inside of DTensor nor in inference mode.

What a rank puts on the wire, N ranks in the group, by the standard (bandwidth-optimal) algorithm of each collective:

| kind | bytes |
|---|---|
| all_reduce | 2 (N−1)/N × the tensor |
| all_gather | (N−1) × the rank's own part |
| reduce_scatter | (N−1)/N × the whole input |
| all_to_all | what goes to other ranks, in one collective or in messages that are tagged as one |
| broadcast, reduce | (N−1)/N × the tensor on each rank: N−1 copies, by whichever rank sends them on |
| gather | the rank's own part, but for the root |
| scatter | what goes to other ranks, on the root |
| ring | the tensor: messages from one rank to another, counted where they are sent |

A backend may do something else: gloo reduces in other ways, NCCL's trees send as much in other shares.

**Time** is spent elsewhere, where a result is waited for. So spans are those of the functions of torch.distributed,
which are wrapped; and of what they, FSDP and DeepSpeed begin without waiting, seconds are those of `Work.wait`. A
collective that overlaps with computation shows as the time spent waiting for it; on GPUs, where calls return before the
work is done, seconds are those of the host alone."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as functional

from dhp.core.collectives import RECORD
from dhp.core.torch_private import FRONT_KEY, keys_behind
from dhp.core.tracing import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    COLLECTIVE,
    EXCHANGE_TAG,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    RING,
    SCATTER,
    add_sent,
    span,
)

_BLOCKING = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
_MARK = "_dhp_timed"


def time_collectives() -> None:
    """From now on each collective is a span, and its seconds are added to `dhp.core.tracing`; calling it again changes
    nothing."""
    for name in _BLOCKING:
        setattr(dist, name, _timed(name, getattr(dist, name)))
    dist.Work.wait = _held(dist.Work.wait)
    # What DTensor begins is waited for here, when its result is first used.
    functional.wait_tensor = _timed("wait_tensor", functional.wait_tensor)


def _timed(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(collective, _MARK):
        return collective

    @wraps(collective)
    def timed(*arguments: Any, **named: Any) -> Any:
        with span(name, COLLECTIVE), RECORD.held():
            return collective(*arguments, **named)

    setattr(timed, _MARK, True)
    return timed


def _held(wait: Callable[..., Any]) -> Callable[..., Any]:
    """`Work.wait` with its seconds counted. No span: those that matter have a name where they are waited for."""
    if hasattr(wait, _MARK):
        return wait

    @wraps(wait)
    def held(*arguments: Any, **named: Any) -> Any:
        with RECORD.held():
            return wait(*arguments, **named)

    setattr(held, _MARK, True)
    return held


def count_collectives() -> None:
    """From now on each collective is noted in `dhp.core.collectives`, and its bytes are added to
    `dhp.core.tracing`; a second call changes nothing."""
    if _kernels:
        return
    library = torch.library.Library("c10d", "IMPL")
    for name, (kind, group_at, count) in _COUNTS.items():
        operator = getattr(torch.ops.c10d, name).default
        library.impl(operator, _counted(operator, kind, group_at, count), _FIRST.name, with_keyset=True)
    _kernels.append(library)  # they are gone when it is


Count = Callable[[Sequence[Any], ProcessGroup], float]

_FIRST, _AFTER = FRONT_KEY, keys_behind(FRONT_KEY)
_kernels: list[torch.library.Library] = []


def _counted(operator: Any, kind: str, group_at: int, count: Count) -> Callable[..., Any]:
    """The kernel in front: group_at is the index of the group among the operator's arguments."""
    tagged, name = operator is torch.ops.c10d.send.default, operator.overloadpacket.__name__

    def kernel(keys: Any, *arguments: Any, **named: Any) -> Any:
        group = ProcessGroup.unbox(arguments[group_at])
        if group.size() > 1:
            exchanged = tagged and arguments[3] == EXCHANGE_TAG
            add_sent(ALL_TO_ALL if exchanged else kind, count(arguments, group))
            RECORD.note(name, group, arguments)
        return operator.redispatch(keys & _AFTER, *arguments, **named)

    return kernel


def _nbytes(tensors: Tensor | Iterable[Any]) -> int:
    """Bytes of a tensor, or of all in a list, or in a list of lists."""
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_nbytes, tensors))


def _whole(at: int, times: int = 1) -> Count:
    """`times` (N−1)/N of what an argument holds: each rank passes on all but its own share."""
    return lambda given, group: times * (group.size() - 1) * _nbytes(given[at]) / group.size()


def _to_each(given: Sequence[Any], group: ProcessGroup) -> float:
    return (group.size() - 1) * _nbytes(given[1])


def _rows_to_others(given: Sequence[Any], group: ProcessGroup) -> float:
    rows, splits = given[1], given[4]
    if not splits:  # as many to each
        splits = (1,) * group.size()
    return rows.nbytes * (sum(splits) - splits[group.rank()]) / max(sum(splits), 1)


def _list_to_others(given: Sequence[Any], group: ProcessGroup) -> float:
    return _nbytes(given[1]) - _nbytes(given[1][group.rank()])


def _to_root(given: Sequence[Any], group: ProcessGroup) -> float:
    return 0 if group.rank() == given[3] else _nbytes(given[1])


def _message(given: Sequence[Any], group: ProcessGroup) -> float:
    return _nbytes(given[0])


def _nothing(given: Sequence[Any], group: ProcessGroup) -> float:
    return 0


# By operator: the kind, the index of the group among the arguments, and what a rank sends.
_COUNTS: dict[str, tuple[str, int, Count]] = {
    "allreduce_": (ALL_REDUCE, 1, _whole(0, 2)),
    "allreduce_coalesced_": (ALL_REDUCE, 1, _whole(0, 2)),
    "allgather_": (ALL_GATHER, 2, _to_each),
    "_allgather_base_": (ALL_GATHER, 2, _to_each),
    "allgather_coalesced_": (ALL_GATHER, 2, _to_each),
    "allgather_into_tensor_coalesced_": (ALL_GATHER, 2, _to_each),
    "reduce_scatter_": (REDUCE_SCATTER, 2, _whole(1)),
    "_reduce_scatter_base_": (REDUCE_SCATTER, 2, _whole(1)),
    "reduce_scatter_tensor_coalesced_": (REDUCE_SCATTER, 2, _whole(1)),
    "alltoall_base_": (ALL_TO_ALL, 2, _rows_to_others),
    "alltoall_": (ALL_TO_ALL, 2, _list_to_others),
    "broadcast_": (BROADCAST, 1, _whole(0)),
    "reduce_": (REDUCE, 1, _whole(0)),
    "gather_": (GATHER, 2, _to_root),
    "scatter_": (SCATTER, 2, _whole(1)),  # only the root has anything there
    "send": (RING, 1, _message),
    "recv_": (RING, 1, _nothing),
    "barrier": (BARRIER, 1, _nothing),
}
