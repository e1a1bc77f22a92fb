"""Bytes that sharded attention sends against their closed forms, forward and backward apart.

The forms are those of `dhp.plan.count.rank_traffic`; where shards are uneven they hold for all ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dhp.core.tracing import take_sent
from dhp.parallel.attention.segment_plan import plan_shard
from dhp.parallel.attention.segments import attend_segments
from dhp.parallel.traffic import count_collectives
from dhp.plan.count.rank_traffic import DividedAttention
from tests.helpers.attention import CPU, DIM, Attention, _position
from tests.helpers.rows import slow_but
from tests.parallel.conftest import RunOnRanks

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
@pytest.mark.parametrize(("ring", "ulysses"), slow_but(MESHES, (2, 2), (1, 2), (2, 1), (3, 1)))
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
