"""Collectives as spans and as bytes: of our own code, of DTensor's, and of whoever else calls torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dhp.core.tracing import COLLECTIVE, keep_spans, take_sent, take_spans, take_waited
from dhp.parallel.comm import AllToAll, Shift, begin_sum, exchange_rows, sum_in_place
from dhp.parallel.traffic import _COUNTS, count_collectives, time_collectives
from tests.helpers.ranks import run_on_ranks
from tests.parallel.conftest import RunOnRanks


def _names() -> list[list[str]]:
    time_collectives()
    time_collectives()  # wrapped once all the same
    keep_spans()
    group, found = dist.group.WORLD, []

    def taken() -> None:
        spans = take_spans()
        assert {s.kind for s in spans} <= {COLLECTIVE}
        found.append([s.name for s in spans])

    sum_in_place(torch.ones(3), group)
    taken()
    exchange_rows(torch.ones(2, 1), [1, 1], [1, 1], group)
    taken()
    Shift(torch.ones(2), (2,), group).wait()
    taken()
    partial = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Partial()])
    assert float(partial.redistribute(placements=[Replicate()]).to_local().sum()) == 8.0
    taken()
    return found


def test_each_collective_is_a_span_whoever_began_it() -> None:
    for ours, exchange, shift, of_dtensor in run_on_ranks(_names, 2):
        assert ours == ["all_reduce"]
        assert exchange == ["exchange"]
        assert shift == ["shift"]
        assert "wait_tensor" in of_dtensor  # canary: DTensor waits through the function that is wrapped


LATE_S = 0.3


def _waited() -> dict[str, float]:
    """The second rank is late each time."""
    time_collectives()
    group, mesh = dist.group.WORLD, init_device_mesh("cpu", (2,))
    begun: list[Any] = []
    ways: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: sum_in_place(torch.ones(3), group),
        "begun earlier": lambda: begun.pop().wait(),
        "exchange": lambda: exchange_rows(torch.ones(2, 1), [1, 1], [1, 1], group),
        "shift": lambda: Shift(torch.ones(2), (2,), group).wait(),
        "DTensor": lambda: DTensor.from_local(torch.ones(4), mesh, [Partial()]).full_tensor().sum().item(),
    }
    found = {}
    for name, way in ways.items():
        dist.barrier()
        take_waited()
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        begun.append(begin_sum(torch.ones(3), group) if name == "begun earlier" else None)
        way()
        found[name] = take_waited()
    return found


def test_the_seconds_for_which_others_are_late_are_counted_whatever_waits() -> None:
    punctual, late = run_on_ranks(_waited, 2)
    assert all(seconds > LATE_S / 2 for seconds in punctual.values()), punctual
    assert all(seconds < LATE_S / 2 for seconds in late.values()), late


Sent = dict[str, int]


def _bytes_of(run: Callable[[], Any]) -> Sent:
    count_collectives()
    count_collectives()  # once is enough, twice would count double
    take_sent()
    run()
    return take_sent()


def _of_torch() -> list[Sent]:
    """On 3 ranks, 6 float32 = 24 bytes each; a gather's parts 24 each."""
    rank, six = dist.get_rank(), torch.ones(6)
    parts = [torch.empty(6) for _ in range(3)]
    uneven = [1, 2, 3]  # rows of 8 bytes to each rank
    received = torch.empty(3 * uneven[rank], 2)
    sends = [
        lambda: dist.all_reduce(six),
        lambda: dist.all_reduce(six, async_op=True).wait(),
        lambda: dist.all_reduce(six, dist.ReduceOp.MAX),
        lambda: dist.all_gather(parts, six),
        lambda: dist.all_gather_into_tensor(torch.empty(18), six),
        lambda: dist.reduce_scatter_tensor(torch.empty(2), six),
        lambda: dist.all_to_all_single(torch.empty(6), six),
        lambda: dist.all_to_all_single(received, torch.ones(6, 2), [uneven[rank]] * 3, uneven),
        lambda: dist.broadcast(six, 1),
        lambda: dist.reduce(six, 1),
        lambda: dist.gather(six, parts if rank == 1 else None, 1),
        lambda: dist.scatter(torch.empty(6), parts if rank == 1 else None, 1),
        lambda: dist.send(six, 1) if rank == 0 else dist.recv(six, 0) if rank == 1 else None,
        dist.barrier,
    ]
    return [_bytes_of(send) for send in sends]


def test_bytes_of_each_collective(on_ranks: RunOnRanks) -> None:
    for rank, sent in enumerate(on_ranks(_of_torch, 3)):
        root = rank == 1
        assert sent == [
            *[{"all_reduce": 32}] * 3,
            *[{"all_gather": 48}] * 2,
            {"reduce_scatter": 16},
            {"all_to_all": 16},
            {"all_to_all": 8 * (6 - (1, 2, 3)[rank])},
            {"broadcast": 16},
            {"reduce": 16},
            {} if root else {"gather": 24},
            {"scatter": 48} if root else {},
            {"ring": 24} if rank == 0 else {},
            {},
        ]


def _of_ours() -> list[Sent]:
    """On 4 ranks: in pairs, all together, alone."""
    mesh = init_device_mesh("cpu", (2, 2))
    pair, alone = mesh.get_group(1), dist.new_subgroups(1)[0]
    rows, kept = torch.ones(4, 2, requires_grad=True), []
    return [
        _bytes_of(lambda: sum_in_place(torch.ones(4), pair)),
        _bytes_of(lambda: begin_sum(torch.ones(4), dist.group.WORLD).wait()),
        _bytes_of(lambda: dist.all_reduce(torch.ones(4), group=alone)),
        _bytes_of(lambda: Shift(torch.ones(4), (4,), pair).wait()),
        _bytes_of(lambda: kept.append(AllToAll.apply(rows, (2, 2), (2, 2), pair))),
        _bytes_of(lambda: kept[0].sum().backward()),
    ]


def test_a_subgroup_has_its_own_size(on_ranks: RunOnRanks) -> None:
    for sent in on_ranks(_of_ours, 4):
        assert sent == [
            {"all_reduce": 16}, {"all_reduce": 24}, {}, {"ring": 16}, {"all_to_all": 16}, {"all_to_all": 16}
        ]  # fmt: skip


def _of_dtensor() -> list[Sent]:
    mesh = init_device_mesh("cpu", (2,))
    kept: list[DTensor] = []

    def change(*to: Any) -> Callable[[], Any]:
        return lambda: kept.append(kept[-1].redistribute(placements=list(to)))

    kept.append(DTensor.from_local(torch.ones(4, 4, requires_grad=True), mesh, [Partial()]))
    steps = [_bytes_of(change(Shard(0))), _bytes_of(change(Replicate()))]
    backward = _bytes_of(lambda: kept[-1].to_local(grad_placements=[Partial()]).sum().backward())
    kept.append(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    steps += [backward, _bytes_of(change(Replicate()))]
    with torch.inference_mode():
        steps.append(_bytes_of(lambda: functional.all_reduce(torch.ones(4), "sum", mesh).sum()))
    own = torch.ones(4, requires_grad=True)
    gathered = functional.all_gather_tensor_autograd(own, 0, mesh)
    return [*steps, _bytes_of(lambda: gathered.sum().backward())]


def test_canary_what_dtensor_begins_is_counted_forward_and_backward(on_ranks: RunOnRanks) -> None:
    """It never calls the functions of torch.distributed, and runs below autograd's place in the dispatcher."""
    for scattered, gathered, backward, summed, inferred, backward_of_gather in on_ranks(_of_dtensor, 2):
        assert scattered == {"reduce_scatter": 32}  # half of 64 bytes
        assert gathered == {"all_gather": 32}
        assert backward == {"reduce_scatter": 32, "all_gather": 32}
        assert summed == {"all_reduce": 64}
        assert inferred == {"all_reduce": 16}
        assert backward_of_gather == {"reduce_scatter": 16}


SENDS_NOTHING = {"barrier", "check_for_nan", "monitored_barrier_", "recv_", "recv_any_source_"}


def test_canary_every_operator_of_torch_is_counted_or_sends_nothing() -> None:
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    assert {name.removeprefix("c10d::") for name in names if name.startswith("c10d::")} == SENDS_NOTHING | set(_COUNTS)


def test_canary_operators_take_their_group_where_it_is_looked_for() -> None:
    for name, (_, group_at, _) in _COUNTS.items():
        arguments = getattr(torch.ops.c10d, name).default._schema.arguments
        assert arguments[group_at].name == "process_group", name
