"""One rank, in its namespace: `python -m experiments.two_hosts.rank RANK ROUNDS CASES`. Rank 0 prints all results."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dhp.core.tracing import take_sent
from dhp.parallel.attention.segment_plan import MeshPosition, plan_shard
from dhp.parallel.attention.segments import attend_segments
from dhp.parallel.attention.shard_plan import zigzag_plan
from dhp.parallel.traffic import count_collectives
from dhp.plan.count.rank_traffic import DividedAttention
from experiments.two_hosts.network import NIC, RANKS, address, sent_over_link

FORWARD, BACKWARD = "forward", "backward"
ELEMENT_BYTES = 4  # float32


@dataclass(frozen=True)
class Case:
    """Ranks in order, Ulysses innermost: with ulysses=2 the exchange stays on a host and the ring crosses."""

    layout: str
    ring: int
    ulysses: int
    heads: int
    kv_heads: int
    tokens: int
    dim: int
    gather: bool = False

    @property
    def kv_ratio(self) -> float:
        return self.kv_heads / self.heads

    def bytes_sent(self, direction: str) -> float:
        """By a rank, in all."""
        shape = self._shape()
        return shape.exchange() + self._around(shape, direction)

    def bytes_over_link(self, direction: str) -> float:
        """By the rank that sends most to the other host. A ring of 4 crosses at two places, one of 2 everywhere; of the
        three peers of a Ulysses rank two are there, or none."""
        shape = self._shape()
        return shape.exchange() * (2 / 3 if self.ulysses == 4 else 0) + self._around(shape, direction)

    def _around(self, shape: DividedAttention, direction: str) -> float:
        return shape.ring_forward() if direction == FORWARD else shape.ring_backward()

    def _shape(self) -> DividedAttention:
        numbers = (self.tokens, self.heads, self.kv_heads, self.dim, self.ring, self.ulysses)
        return DividedAttention(*numbers, ELEMENT_BYTES, gather=self.gather)


PORT = 29577
TIMEOUT = timedelta(seconds=120)
CPU = torch.device("cpu")


def measure(run: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What `run` returns, and its seconds, bytes counted, and bytes over this rank's link."""
    dist.barrier()
    take_sent()
    before, begin = sent_over_link(), time.perf_counter()
    result = run()
    seconds, sent = time.perf_counter() - begin, sum(take_sent().values())
    dist.barrier()  # by now all of it has been received, and so has left
    return result, {"seconds": seconds, "sent": sent, "over_link": sent_over_link() - before}


def attend(case: Case, position: MeshPosition) -> dict[str, Any]:
    """Forward and backward of causal attention over one sequence; or why it is refused."""
    shards = zigzag_plan([case.tokens], case.ring, case.ulysses)
    rows = len(shards.positions(position.ring_rank, position.ulysses_rank))
    plan = plan_shard(shards, position, CPU, causal=True, gather=case.gather)
    heads = (case.heads, case.kv_heads, case.kv_heads)
    states = [torch.randn(rows, count, case.dim, requires_grad=True) for count in heads]
    grad = torch.randn(rows, case.heads, case.dim)
    try:
        output, forward = measure(lambda: attend_segments(*states, plan, case.dim**-0.5))
    except ValueError as error:  # on all ranks alike, before anything is sent
        return {"refused": str(error)}
    _, backward = measure(lambda: output.backward(grad))
    return {FORWARD: forward, BACKWARD: backward}


def mesh_positions(cases: list[Case]) -> dict[Case, MeshPosition]:
    """This rank's position in each case's mesh."""
    made: dict[tuple[int, int], MeshPosition] = {}
    for case in cases:
        shape = (case.ring, case.ulysses)
        if shape not in made:
            made[shape] = MeshPosition.of(init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses")))
    return {case: made[case.ring, case.ulysses] for case in cases}


def main() -> None:
    rank, rounds = int(sys.argv[1]), int(sys.argv[2])
    cases = [Case(**given) for given in json.loads(sys.argv[3])]
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = NIC
    store = dist.TCPStore(address(0), PORT, RANKS, rank == 0, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=TIMEOUT)
    count_collectives()
    position_of = mesh_positions(cases)
    found = [[attend(case, position_of[case]) for case in cases] for _ in range(rounds + 1)][1:]
    of_ranks: list[Any] = [None] * RANKS
    dist.all_gather_object(of_ranks, found)
    if rank == 0:
        print(json.dumps(of_ranks))
    dist.barrier()  # rank 0 holds the store that the others need until they are gone
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
