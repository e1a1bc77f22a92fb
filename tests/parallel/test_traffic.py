"""Collectives as spans: of our own code, of DTensor's, and of whoever else calls torch.distributed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from dhp.parallel.collectives import exchange_rows, sum_in_place
from dhp.parallel.traffic import trace_collectives
from dhp.spans import COLLECTIVE, keep_spans, take_spans
from tests.helpers.ranks import run_on_ranks


def _names() -> list[list[str]]:
    trace_collectives()
    trace_collectives()  # wrapped once all the same
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
    partial = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Partial()])
    assert float(partial.redistribute(placements=[Replicate()]).to_local().sum()) == 8.0
    taken()
    return found


def test_each_collective_is_a_span_whoever_began_it() -> None:
    for ours, exchange, of_dtensor in run_on_ranks(_names, 2):
        assert ours == ["all_reduce"]
        assert exchange == ["all_to_all_single"]
        assert "wait_tensor" in of_dtensor  # canary: DTensor waits through the function that is wrapped
