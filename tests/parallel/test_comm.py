"""Meshes, collectives and the bytes that they send."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dhp.core.axes import MESH, Degrees
from dhp.core.tracing import COLLECTIVE, keep_spans, take_sent, take_spans, take_waited
from dhp.parallel import comm
from dhp.parallel.attention.segment_plan import plan_shard
from dhp.parallel.attention.segments import attend_segments
from dhp.parallel.comm import (
    AllToAll,
    Shift,
    begin_sum,
    build_mesh,
    exchange_rows,
    largest_in_place,
    neighbours_mesh,
    replicas_mesh,
    sum_in_place,
)
from dhp.parallel.tensor.slices import AdapterCut
from dhp.parallel.traffic import _COUNTS, count_collectives, time_collectives
from dhp.plan.count.rank_traffic import DividedAttention
from tests.helpers.attention import CPU, DIM, Attention, _position
from tests.helpers.ranks import run_on_ranks
from tests.helpers.rows import slow_but
from tests.parallel.conftest import RunOnRanks

SEND = ((1, 0, 2), (3, 1, 0), (0, 2, 2))  # SEND[from][to] rows


def _exchange() -> tuple[Tensor, Tensor]:
    rank = dist.get_rank()
    rows = (100.0 * rank + torch.arange(sum(SEND[rank]), dtype=torch.float64))[:, None].requires_grad_()
    receive = [SEND[other][rank] for other in range(3)]
    got = AllToAll.apply(rows, SEND[rank], receive, dist.group.WORLD)
    (got * got).sum().backward()  # the gradient of each row must come home: 2 × its value
    return got.detach().flatten(), (rows.grad - 2 * rows.detach()).flatten()


def test_rows_arrive_by_rank_and_gradients_go_home() -> None:
    results = run_on_ranks(_exchange, 3)
    assert [got.tolist() for got, _ in results] == [[0, 100, 101, 102], [103, 200, 201], [1, 2, 202, 203]]
    assert all(not error.any() for _, error in results)


class _Backend:
    """A backend with an all-to-all of its own, as NCCL has: gloo's, under another name."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, list[int], list[int]]] = []
        self._exchange = dist.all_to_all_single

    def all_to_all_single(
        self, target: Tensor, source: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup
    ) -> None:
        self.calls.append((len(target), len(source), receive, send))
        self._exchange(target, source, receive, send, group=group)


def _exchange_by_the_backend() -> tuple[Tensor, Tensor, list]:
    backend = _Backend()
    dist.get_backend, dist.all_to_all_single = lambda _=None: "nccl", backend.all_to_all_single
    return *_exchange(), backend.calls


def test_a_backend_with_its_own_all_to_all_is_told_what_goes_and_what_comes() -> None:
    results = run_on_ranks(_exchange_by_the_backend, 3)
    assert [got.tolist() for got, *_ in results] == [[0, 100, 101, 102], [103, 200, 201], [1, 2, 202, 203]]
    assert all(not error.any() for _, error, _ in results)
    for rank, (*_, calls) in enumerate(results):
        send, receive = list(SEND[rank]), [of_rank[rank] for of_rank in SEND]
        there, back = (sum(receive), sum(send), receive, send), (sum(send), sum(receive), send, receive)
        assert calls == [there, back]


def _shift() -> tuple[Tensor, Tensor]:
    rank = dist.get_rank()
    own = torch.arange(2.0 * (rank + 1)).view(rank + 1, 2) + 100 * rank
    before = (rank - 1) % 3
    return Shift(own, (before + 1, 2), dist.group.WORLD).wait(), own


def test_a_ring_sends_to_the_next_and_receives_from_the_one_before() -> None:
    results = run_on_ranks(_shift, 3)
    for rank, (got, _) in enumerate(results):
        assert torch.equal(got, results[rank - 1][1])


def _largest() -> Tensor:
    return largest_in_place(torch.tensor([1.0, -2.0]) * (dist.get_rank() + 1), dist.group.WORLD)


def test_largest_in_place() -> None:
    assert [t.tolist() for t in run_on_ranks(_largest, 2)] == [[2.0, -2.0]] * 2


def _staged() -> list[Tensor]:
    comm._must_stage = lambda *_: True  # as where ranks share a GPU
    work = comm.begin_sum(total := torch.tensor([1.0, 2.0]) * (dist.get_rank() + 1), dist.group.WORLD)
    assert work is None
    return [total, _largest(), *_exchange()]


def test_what_is_staged_is_the_same() -> None:
    first, second, third = run_on_ranks(_staged, 3)
    for total, largest, _, error in (first, second, third):
        assert total.tolist() == [6.0, 12.0] and largest.tolist() == [3.0, -2.0] and not error.any()
    assert second[2].tolist() == [103, 200, 201]


def _sum() -> Tensor:
    return sum_in_place(torch.tensor([1.0, 2.0]) * (dist.get_rank() + 1), dist.group.WORLD)


def test_sum_in_place() -> None:
    assert [t.tolist() for t in run_on_ranks(_sum, 2)] == [[3.0, 6.0], [3.0, 6.0]]


Sent = dict[str, int]
MESHES = [(1, 4), (4, 1), (2, 2), (1, 2), (2, 1), (1, 3), (3, 1)]


def _sent(cases: Sequence[Attention]) -> list[tuple[Sent, Sent]]:
    """On a rank: bytes of each case's forward, and of its backward."""
    count_collectives()
    found = []
    for case in cases:
        shards, position = case.plan(), _position(case, {})
        own = shards.positions(position.ring_rank, position.ulysses_rank)
        *states, grad = (s[own].to(case.dtype) for s in case.states())
        leaves = [s.clone().requires_grad_() for s in states]
        plan = plan_shard(shards, position, CPU, case.causal, case.gather)
        take_sent()
        output = attend_segments(*leaves, plan, DIM**-0.5)
        forward = take_sent()
        output.backward(grad)
        found.append((forward, take_sent()))
    return found


def _shape(case: Attention, tokens: int) -> DividedAttention:
    exact = 8 if case.dtype == torch.float64 else 4
    of_case = (case.heads, case.kv_heads, DIM, case.ring, case.ulysses, case.dtype.itemsize, exact, case.gather)
    return DividedAttention(tokens, *of_case)


def _expected(case: Attention, tokens: int) -> tuple[Sent, Sent]:
    """A rank's bytes where `tokens` are divided evenly over all ranks."""
    shape = _shape(case, tokens)
    ring = "all_to_all" if case.gather else "ring"
    directions = []
    for around in (shape.ring_forward(), shape.ring_backward()):
        sent = {"all_to_all": shape.exchange()}
        sent[ring] = sent.get(ring, 0) + around
        directions.append({kind: round(nbytes) for kind, nbytes in sent.items() if nbytes})
    return directions[0], directions[1]


def _total(of_ranks: Sequence[Sent]) -> Sent:
    return {kind: sum(sent.get(kind, 0) for sent in of_ranks) for kind in {k for sent in of_ranks for k in sent}}


@pytest.mark.parametrize("gather", [False, True], ids=["around", "at once"])
@pytest.mark.parametrize(("ring", "ulysses"), slow_but(MESHES, (2, 2), (3, 1)))
def test_even_shards_send_what_the_formula_says(on_ranks: RunOnRanks, ring: int, ulysses: int, gather: bool) -> None:
    heads = 12 if 3 in (ring, ulysses) else 8
    cases = [
        Attention((48,), ring, ulysses, heads, kv_heads, causal, layout, gather=gather, dtype=dtype)
        for kv_heads in (heads, heads // 4)
        for causal, layout in ((True, "zigzag"), (False, "contiguous"))
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    ]
    for of_rank in on_ranks(_sent, ring * ulysses, cases):
        for case, found in zip(cases, of_rank, strict=True):
            assert found == _expected(case, 48), case


@pytest.mark.parametrize(("ring", "ulysses", "sent_heads"), [(1, 2, (10, 10)), (2, 2, (10, 10)), (1, 4, (12, 4))])
def test_heads_that_ranks_do_not_divide_are_sent_with_zeros(
    on_ranks: RunOnRanks, ring: int, ulysses: int, sent_heads: tuple[int, int]
) -> None:
    """9 query and 3 key/value heads: with two ranks 5 of each, with four 3 and 1."""
    case = Attention((48,), ring, ulysses, 9, 3, dtype=torch.float32)
    heads, kv_heads = sent_heads
    exchanged = 4 * 48 // (ring * ulysses) * 2 * (heads + kv_heads) * DIM * (ulysses - 1) // ulysses
    for ((forward, backward),) in on_ranks(_sent, ring * ulysses, [case]):
        assert forward["all_to_all"] == backward["all_to_all"] == exchanged
        assert (forward, backward) == _expected(case, 48)


UNEVEN = [
    (Attention((45,), 4, 1, rank_tokens=(1, 20, 3, 21), dtype=torch.float32), 45),
    (Attention((45,), 1, 4, rank_tokens=(1, 20, 3, 21), dtype=torch.float32), 45),
    (Attention((45,), 2, 2, kv_heads=2, rank_tokens=(1, 20, 3, 21), dtype=torch.float32), 45),
    # Segments that a rank holds whole stay at home: only the one of 30 is divided.
    (Attention((6, 30, 6), 1, 4, rank_tokens=(6, 15, 15, 6), dtype=torch.float32), 30),
    (Attention((6, 30, 6), 4, 1, rank_tokens=(6, 15, 15, 6), dtype=torch.float32), 30),
]


@pytest.mark.parametrize(("case", "divided"), UNEVEN, ids=lambda value: str(getattr(value, "lengths", value)))
def test_uneven_shards_send_as_much_all_together(on_ranks: RunOnRanks, case: Attention, divided: int) -> None:
    ranks = case.ring * case.ulysses
    of_ranks = on_ranks(_sent, ranks, [case])
    for direction, wanted in enumerate(_expected(case, divided)):
        total = _total([found[0][direction] for found in of_ranks])
        assert total == {kind: ranks * nbytes for kind, nbytes in wanted.items()}


def test_whole_segments_are_never_sent(on_ranks: RunOnRanks) -> None:
    cases = [Attention((12, 12, 12, 12), ring, 4 // ring) for ring in (1, 2, 4)]
    assert on_ranks(_sent, 4, cases) == [[({}, {})] * 3] * 4


def test_a_segment_within_a_ring_rank_does_not_enter_the_ring(on_ranks: RunOnRanks) -> None:
    case = Attention((24, 24), 2, 2, dtype=torch.float32)
    exchanged = round(_shape(case, 48).exchange())
    assert on_ranks(_sent, 4, [case]) == [[({"all_to_all": exchanged},) * 2]] * 4


WAIT = timedelta(seconds=77)


def _ranks_and_timeouts() -> tuple[dict[str, list[int]], set[timedelta]]:
    _set_pg_timeout(WAIT, dist.group.WORLD)
    mesh = build_mesh("cpu", Degrees(data=2, tensor=2))
    groups = {axis: mesh.get_group(axis) for axis in MESH} | {"replicas": replicas_mesh(mesh).get_group()}
    waits = {group._get_backend(torch.device("cpu")).options._timeout for group in groups.values()}
    return {axis: dist.get_process_group_ranks(group) for axis, group in groups.items()}, waits


def test_axes_join_their_ranks_and_wait_as_long_as_the_whole_part() -> None:
    """torch gives the groups of a mesh the backend's own timeout, whatever the default group has."""
    answers = run_on_ranks(_ranks_and_timeouts, 4)
    assert [waits for _, waits in answers] == [{WAIT}] * 4
    assert [ranks["tensor"] for ranks, _ in answers] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [ranks["data"] for ranks, _ in answers] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [ranks["replicas"] for ranks, _ in answers] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [ranks["ring"] for ranks, _ in answers] == [[0], [1], [2], [3]]


def _expert_ranks(degrees: Degrees) -> tuple[list[list[int]], set[timedelta]]:
    _set_pg_timeout(WAIT, dist.group.WORLD)
    mesh = neighbours_mesh(build_mesh("cpu", degrees), 2, "experts")
    groups = [mesh.get_group(axis) for axis in ("experts", "copies")]
    waits = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    return [dist.get_process_group_ranks(group) for group in groups], waits


def test_neighbours_share_out_experts_and_every_second_one_has_the_same() -> None:
    answers = run_on_ranks(_expert_ranks, 4, Degrees(data=4, expert=2))
    assert [waits for _, waits in answers] == [{WAIT}] * 4
    assert [ranks for ranks, _ in answers] == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]


def _holders() -> tuple[list[list[int]], list[int]]:
    mesh = neighbours_mesh(build_mesh("cpu", Degrees(data=2, expert=2, tensor=2, ulysses=2)), 2, "experts")
    axes = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in ("experts", "tensor", "copies")]
    cut = AdapterCut(mesh["experts", "tensor"], (Shard(0), Shard(2)), torch.Size((4, 4, 4)))
    assert cut.tensor_ranks is mesh.get_group("tensor")
    return axes, dist.get_process_group_ranks(cut.holders)


def test_replicas_and_their_tensor_ranks_hold_all_experts() -> None:
    answers = run_on_ranks(_holders, 8)
    assert answers[0] == ([[0, 4], [0, 1], [0, 2]], [0, 1, 4, 5])
    assert answers[7] == ([[3, 7], [6, 7], [5, 7]], [2, 3, 6, 7])


def test_ranks_of_a_row_have_the_same_experts() -> None:
    answers = run_on_ranks(_expert_ranks, 4, Degrees(data=2, expert=2, ulysses=2))
    assert [ranks for ranks, _ in answers] == [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]


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
