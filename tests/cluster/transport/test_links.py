"""Tensors from rank to rank, past the host's memory on GPUs: the same code over gloo."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dhp.cluster.transport.links import LinkParcel, Links, Peer
from dhp.cluster.transport.shared_memory import Parcel
from dhp.core.axes import Degrees
from dhp.core.errors import PartFailed
from dhp.core.graph import StageGraph, Way, backward_way, forward_way
from tests.helpers.graphs import make_graph

VISION, TEXT = Degrees(ulysses=2), Degrees(data=2, tensor=2)


def connected(graph: StageGraph, near: Callable[[Peer], list[Peer]] = lambda peer: []) -> dict[Peer, Links]:
    """The links of every rank, each made by a thread of its own, since each waits for the others."""
    store, sizes = dist.HashStore(), {stage.name: stage.degrees.world for stage in graph.stages}
    peers = [(stage.name, rank) for stage in graph.stages for rank in range(stage.degrees.world)]

    def make(peer: Peer) -> Links:
        return Links(peer, graph.ways(), sizes, store, torch.device("cpu"), near(peer), 20.0)

    with ThreadPoolExecutor(len(peers)) as threads:
        return dict(zip(peers, threads.map(make, peers), strict=True))


def numbers(count: int, seed: int) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


def test_ways_are_there_and_back_between_all_ranks_that_may_send() -> None:
    graph = make_graph(VISION, TEXT)
    forward, back = graph.ways()
    assert (forward_way(0), backward_way(0)) == (0, 1)
    # Each vision shard to all tensor ranks of each replica, and the first of these back to it.
    assert forward == Way("vision", "text", tuple((v, t) for v in (0, 1) for t in range(4)))
    assert back == Way("text", "vision", ((0, 0), (2, 0), (0, 1), (2, 1)))


def test_stages_of_one_part_send_straight_on_and_ties_both_ways() -> None:
    graph = make_graph(stages=2, chunks=2, layers=4, text=Degrees(data=2), tied=True)
    ways = dict(enumerate(graph.ways()))
    inner = [n for n, edge in enumerate(graph.edges) if edge.source.stage == "text.0" and edge.target.stage == "text.1"]
    assert inner and all(ways[forward_way(n)] == Way("text.0", "text.1", ((0, 0), (1, 1))) for n in inner)
    assert ways[graph.tied_way("text.0")] == Way("text.0", "text.1", ((0, 0), (1, 1)))
    assert ways[graph.tied_way("text.1")] == Way("text.1", "text.0", ((0, 0), (1, 1)))


def test_each_rank_gets_what_was_sent_to_it_in_steps_of_uneven_sizes() -> None:
    found = connected(make_graph(VISION, TEXT))
    for step in range(3):
        sent = {}
        for rank in (0, 1):
            for micro_batch, (count, to) in enumerate([(5 + step, (0, 1)), (900, (2, 3)), (1, (0, 1))]):
                values = numbers(count, 10 * step + micro_batch + rank)
                sent[rank, micro_batch] = values, to, found["vision", rank].send(values, 0, to)
        # In another order than they are sent, as far as each two ranks see none.
        for rank, micro_batch in [(1, 1), (0, 0), (1, 0), (0, 1), (0, 2), (1, 2)]:
            values, to, parcel = sent[rank, micro_batch]
            assert isinstance(parcel, LinkParcel) and parcel.near is None
            for target in to:
                assert torch.equal(found["text", target].open(parcel), values)
        gradient = numbers(7, step)
        back = found["text", 2].send(gradient, 1, (1,))
        assert torch.equal(found["vision", 1].open(back), gradient)
        for one in found.values():
            one.end_step()
    assert all(not one._under_way for one in found.values())


def test_nobody_waits_for_a_rank_that_does_not_take_what_is_under_way() -> None:
    found = connected(make_graph(VISION, TEXT))
    late = [found["vision", 0].send(numbers(1 << 16, n), 0, (3,)) for n in range(4)]
    for n in range(3):
        parcel = found["vision", 0].send(numbers(8, n), 0, (0,))
        assert torch.equal(found["text", 0].open(parcel), numbers(8, n))
    assert all(torch.equal(found["text", 3].open(one), numbers(1 << 16, n)) for n, one in enumerate(late))


def test_what_was_taken_is_let_go_of_before_the_step_ends() -> None:
    """As NCCL tells it; gloo knows it at the end."""
    rank = connected(make_graph(VISION, TEXT))["vision", 0]
    done = [True, False, False]
    works = [SimpleNamespace(is_completed=lambda n=n: done[n]) for n in range(3)]
    coming = iter(works)
    rank._groups[0] = SimpleNamespace(send=lambda *_: next(coming))
    for n in range(3):
        rank.send(numbers(1, n), 0, (1,))
    assert [work for work, _ in rank._under_way] == works[1:]


def test_what_is_taken_out_of_order_is_refused_with_both_numbers() -> None:
    found = connected(make_graph(VISION, TEXT))
    found["vision", 0].send(numbers(2, 0), 0, (1,))
    second = found["vision", 0].send(numbers(2, 1), 0, (1,))
    with pytest.raises(PartFailed, match="text rank 1 takes tensor 1 of vision rank 0 where 0 comes next"):
        found["text", 1].open(second)


def test_on_one_gpu_the_tensor_is_mapped_and_nothing_is_sent() -> None:
    """Vision rank r and text rank r share a GPU, as where parts are collocated."""
    other = {"vision": "text", "text": "vision"}
    found = connected(make_graph(Degrees(data=2), Degrees(tensor=2)), lambda peer: [(other[peer[0]], peer[1])])
    values = torch.arange(40_000.0)
    parcel = found["vision", 1].send(values, 0, (0, 1))
    assert parcel.numbers == {0: 0} and parcel.near is not None
    assert isinstance(parcel.near, Parcel) and torch.equal(found["text", 1].open(parcel), values)
    assert torch.equal(found["text", 0].open(parcel), values)
    found["vision", 1].end_step()


def test_a_sender_that_is_gone_ends_its_receiver_within_the_limit(tmp_path: Any) -> None:
    from tests.helpers.ranks import context

    pipes = [context().Pipe() for _ in range(2)]
    ranks = [
        context().Process(target=_of_two, args=(number, str(tmp_path / "store"), pipes[number][1])) for number in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    try:
        assert pipes[0][0].recv() == pipes[1][0].recv() == "connected"
        ranks[0].kill()
        ranks[0].join()
        begun = time.monotonic()
        pipes[1][0].send("take")
        assert pipes[1][0].poll(30.0) and pipes[1][0].recv() == "RuntimeError"
        assert time.monotonic() - begun < 20.0
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _of_two(number: int, store: str, pipe: Any) -> None:
    graph, own = make_graph(Degrees(), Degrees()), ("vision", "text")[number]
    opened = dist.FileStore(store, 2)
    opened.set_timeout(timedelta(seconds=20))
    made = Links((own, 0), graph.ways(), {"vision": 1, "text": 1}, opened, torch.device("cpu"), (), 5.0)
    pipe.send("connected")
    pipe.recv()
    try:
        made.open(LinkParcel(0, 0, {0: 0}, None, (2,), torch.float32))
    except RuntimeError as error:
        pipe.send(type(error).__name__)
    threading.Event().wait()
