"""The record of collectives, and the check that ranks agree: canaries of what torch's own check misses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dhp.core import collectives
from dhp.core.collectives import RECORD, CallRecord, watch_layers
from dhp.core.tracing import take_waited
from dhp.parallel.comm import build_mesh
from tests.helpers import ranks
from tests.helpers.ranks import LocalGroup, _Caller


def run_checked(function: Any, size: int = 2, *arguments: Any) -> list[Any]:
    with LocalGroup(_Caller, size, checked=True) as group:
        return group.execute_all("call", function, *arguments)


Known = tuple[str, tuple[int, ...], dict[str, int]]


def _known() -> Known:
    return str(RECORD.last), () if RECORD.last is None else RECORD.last.members, RECORD.numbers


def _alike() -> Known:
    dist.all_reduce(torch.ones(3))
    dist.all_gather_into_tensor(torch.empty(4, 2), torch.ones(2, 2))
    return _known()


def test_the_last_call_and_the_number_of_all_are_known() -> None:
    last = "_allgather_base_(float32[4, 2], float32[2, 2]), call 2 in group 0 of 2 ranks"
    assert run_checked(_alike) == [(last, (0, 1), {"0": 2})] * 2


def test_before_the_first_call_there_is_none() -> None:
    assert run_checked(_known, 1) == [("None", (), {})]


def _apart() -> Known:
    """Ranks 0 and 2 in a group of their own."""
    pair = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(1), group=pair)
    return _known()


def test_members_are_ranks_of_the_stage() -> None:
    (last, members, _), (none, *_), _ = run_checked(_apart, 3)
    assert last.endswith("of 2 ranks") and members == (0, 2) and none == "None"


def test_what_holds_a_process_is_one_wait_however_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(collectives.time, "monotonic", lambda: now[0])
    record = CallRecord()
    take_waited()
    with pytest.raises(ZeroDivisionError), record.held():
        now[0] = 11.0
        with record.held():
            now[0] = 13.0
        assert record.held_since == 10.0
        raise ZeroDivisionError
    assert record.held_since is None and take_waited() == 3.0


class Layer(nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        whole = states.clone()
        dist.all_reduce(whole)
        return whole


def _exchanged() -> None:
    """Two layers of one shape, which the second rank calls the other way round."""
    layers = {"layer 0": Layer(), "layer 1": Layer()}
    watch_layers(layers)
    order = list(layers.values()) if dist.get_rank() == 0 else list(layers.values())[::-1]
    states = torch.ones(3)
    for layer in order:
        states = layer(states)


def test_two_layers_of_equal_shape_exchanged() -> None:
    with pytest.raises(RuntimeError, match="different collectives: .* in layer [01], but rank .* in layer [01]"):
        run_checked(_exchanged)


def _through_backward() -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, states: torch.Tensor) -> torch.Tensor:
            return states.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            summed = gradient.clone()
            dist.all_reduce(summed)
            return summed

    class Communicating(nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return Sum.apply(states) * 1.0

    layers = {"layer 0": Communicating(), "layer 1": Communicating()}
    watch_layers(layers)
    states = torch.ones(3, requires_grad=True)
    order = list(layers.values()) if dist.get_rank() == 0 else list(layers.values())[::-1]
    for layer in order:
        states = layer(states)
    states.sum().backward()


def test_two_layers_exchanged_in_backward() -> None:
    with pytest.raises(RuntimeError, match="in the backward of layer [01], but rank .* in the backward of layer [01]"):
        run_checked(_through_backward)


def _one_more() -> None:
    for _ in range(1 + dist.get_rank()):
        dist.all_reduce(torch.ones(3))


def test_one_call_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "AGREE_S", 1)
    with pytest.raises(RuntimeError, match=r"rank 1 waits in allreduce_.*; ranks \[0\] of its group did not make"):
        run_checked(_one_more)


def _another_shape() -> None:
    dist.all_reduce(torch.ones(3 + dist.get_rank()))


def _another_kind() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))
    else:
        dist.broadcast(torch.ones(2), 0)


@pytest.mark.parametrize("function", [_another_shape, _another_kind])
def test_another_shape_or_kind(function: Any) -> None:
    with pytest.raises(RuntimeError, match="ranks of one group make different collectives"):
        run_checked(function)


def _uneven_rows() -> list[int]:
    """Ranks may exchange other numbers of rows: 1 and 2 to oneself, 2 and 1 to the other."""
    own = 1 + dist.get_rank()
    send = [own, 3 - own] if dist.get_rank() == 0 else [3 - own, own]
    receive = [1, 1] if dist.get_rank() == 0 else [2, 2]
    coming = torch.empty(sum(receive), 2)
    dist.all_to_all_single(coming, torch.ones(3, 2), receive, send)
    return list(coming.shape)


def test_all_to_all_of_differing_numbers_of_rows_agrees() -> None:
    assert run_checked(_uneven_rows) == [[2, 2], [4, 2]]


def _in_subgroups() -> int:
    """Groups that share no rank may make as many calls as they like."""
    from dhp.core.axes import Degrees

    mesh = build_mesh("cpu", Degrees(data=2, tensor=2))
    for _ in range(1 + mesh.get_local_rank("data")):
        dist.all_reduce(torch.ones(1 + mesh.get_local_rank("data")), group=mesh.get_group("tensor"))
    assert RECORD.last is not None
    return RECORD.last.number


def test_groups_beside_each_other_are_not_compared() -> None:
    assert run_checked(_in_subgroups, 4) == [1, 1, 2, 2]


def _messages_between() -> int:
    """What only some ranks send is no collective, and moves no number."""
    from dhp.parallel.comm import exchange_rows

    rank = dist.get_rank()
    send, receive = ([0, 1], [0, 0]) if rank == 0 else ([0, 0], [1, 0])
    exchange_rows(torch.ones(sum(send), 2), send, receive, dist.group.WORLD)
    dist.all_reduce(torch.ones(3))
    assert RECORD.last is not None
    return RECORD.last.number


def test_messages_are_not_counted_among_collectives() -> None:
    assert run_checked(_messages_between) == [1, 1]
