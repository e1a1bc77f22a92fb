"""Attention over ranks equals dense attention."""

import time
from dataclasses import replace
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dhp.core.batch import TokenRange
from dhp.parallel.attention import ring
from dhp.parallel.attention.attention_kernels import Block, CpuFlash, Dense
from dhp.parallel.attention.ring import ChunkPair, Ring, merge, visible_pairs
from dhp.parallel.attention.shard_plan import contiguous_plan, given_plan, zigzag_plan
from dhp.parallel.attention.visibility import PLAIN, LayerRule
from dhp.parallel.comm import AllToAll, Shift, sum_in_place
from tests.helpers.attention import Attention, dense_results, sharded_results, whole_results
from tests.helpers.ranks import run_on_ranks
from tests.helpers.rows import slow, slow_but


def test_layouts_hold_every_token_once() -> None:
    lengths = (3, 30, 4, 1, 7)
    plans = [contiguous_plan(lengths, 2, 3), zigzag_plan(lengths, 2, 3), given_plan(lengths, (1, 0, 40, 0, 4, 0), 2)]
    for plan in plans:
        positions = [p for r in range(2) for u in range(3) for p in plan.positions(r, u)]
        assert sorted(positions) == list(range(45))


def test_zigzag_gives_every_ring_rank_the_same_causal_work() -> None:
    plan = zigzag_plan((64,), 4, 1)
    assert plan.chunk(1) == (TokenRange(0, 8, 8), TokenRange(0, 48, 8))
    work = [sum(position + 1 for position in plan.positions(r, 0)) for r in range(4)]
    assert max(work) == min(work)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="the ranks hold 5 tokens, but the segments have 6"):
        given_plan((6,), (2, 3), 2)


def test_causal_pairs_are_whole_diagonal_or_not_there() -> None:
    mine, before, after = TokenRange(0, 8, 4), TokenRange(0, 0, 8), TokenRange(0, 12, 4)
    assert list(visible_pairs((mine,), (before, TokenRange(1, 0, 3)), True)) == [
        ChunkPair(slice(0, 4), slice(0, 8), False)
    ]
    assert list(visible_pairs((mine,), (mine,), True)) == [ChunkPair(slice(0, 4), slice(0, 4), True)]
    assert list(visible_pairs((mine,), (after,), True)) == []
    assert list(visible_pairs((mine,), (after,), False)) == [ChunkPair(slice(0, 4), slice(0, 4), False)]
    with pytest.raises(ValueError, match="overlap"):
        list(visible_pairs((mine,), (TokenRange(0, 10, 4),), True))


def test_under_a_window_a_rank_computes_with_the_keys_its_queries_see_alone() -> None:
    mine, before = TokenRange(0, 600, 300), TokenRange(0, 0, 600)
    pairs = list(visible_pairs((mine,), (before,), True, LayerRule(window=101)))
    assert pairs == [ChunkPair(slice(0, 256), slice(500, 600), False, (range(600, 856), range(500, 600)))]
    own = list(visible_pairs((mine,), (mine,), True, LayerRule(window=101)))
    assert [(pair.queries, pair.keys) for pair in own] == [
        (slice(0, 256), slice(0, 256)),
        (slice(256, 300), slice(156, 300)),
    ]
    assert not list(visible_pairs((mine,), (before,), True, LayerRule(chunk=300)))


def test_pairs_are_listed_once_for_all_layers_of_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = []
    monkeypatch.setattr(ring, "visible_pairs", lambda *given: listed.append(given) or visible_pairs(*given))
    plan = zigzag_plan((64, 32), 2, 1)
    one = Ring((plan.chunk(0), plan.chunk(1)), 0, None, True)
    rules = (LayerRule(), LayerRule(window=5))
    found = [[one.pairs(source, rule) for rule in rules for source in (0, 1)] for _ in range(3)]
    assert len(listed) == 4 and found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1] != found[0][2]


@pytest.mark.parametrize("far", [150.0, -150.0, 1e4, -1e4])
def test_blocks_of_very_different_weight_merge_without_overflow(far: float) -> None:
    near = torch.randn(5, 2, 3, dtype=torch.float64)
    other = torch.randn(5, 2, 3, dtype=torch.float64)
    output, lse = near.clone(), torch.zeros(2, 5, dtype=torch.float64)
    merge(output, lse, other, torch.full((2, 5), far, dtype=torch.float64))
    torch.testing.assert_close(output, other if far > 0 else near, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, torch.full((2, 5), max(far, 0.0), dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_rows_that_saw_nothing_stay_nothing() -> None:
    output, lse = torch.zeros(4, 1, 2), torch.full((1, 4), float("-inf"))
    merge(output, lse, torch.zeros(4, 1, 2), torch.full((1, 4), float("-inf")))
    assert torch.equal(output, torch.zeros(4, 1, 2)) and bool((lse == float("-inf")).all())
    merge(output, lse, torch.ones(4, 1, 2), torch.zeros(1, 4))
    assert torch.equal(output, torch.ones(4, 1, 2))


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_kernels_agree(diagonal: bool, kv_heads: int) -> None:
    query, grad = (torch.randn(6, 4, 8, dtype=torch.float64) for _ in range(2))
    key, value = (torch.randn(6, kv_heads, 8, dtype=torch.float64) for _ in range(2))
    block = Block(diagonal, 0.3)
    (output, lse), (other, other_lse) = (kernel.forward(query, key, value, block) for kernel in (CpuFlash(), Dense()))
    torch.testing.assert_close(output, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, other_lse, rtol=1e-12, atol=1e-12)
    # With the log-sum-exp of more blocks than this one, as a ring gives it.
    wider = lse + 0.7
    both = (kernel.backward(grad, query, key, value, output, wider, block) for kernel in (CpuFlash(), Dense()))
    for mine, theirs in zip(*both, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def _there_and_back() -> bool:
    rank, group = dist.get_rank(), dist.group.WORLD
    send, receive = ((1, 0, 2), (0, 3, 1), (4, 1, 0)), None
    receive = tuple(send[source][rank] for source in range(3))
    rows = torch.randn(sum(send[rank]), 2, dtype=torch.float64, requires_grad=True)
    there = AllToAll.apply(rows, send[rank], receive, group)
    back = AllToAll.apply(there, receive, send[rank], group)
    (back * 3).sum().backward()
    return torch.equal(back, rows) and torch.equal(rows.grad, torch.full_like(rows, 3))


def test_all_to_all_there_and_back_is_the_identity() -> None:
    assert run_on_ranks(_there_and_back, 3) == [True] * 3


def _shift_without_partner() -> str:
    """Rank 1 never comes: the others must not wait for ever."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    if dist.get_rank() == 1:
        time.sleep(6)
        return ""
    try:
        Shift(torch.ones(4), (4,), group).wait()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_ring_whose_neighbour_is_gone_times_out() -> None:
    told = run_on_ranks(_shift_without_partner, 2)[0]
    assert "no error" not in told and told


CASE = Attention((24,), 2, 1, 4, 2, True, "zigzag")


def _planted(fault: str, case: Attention) -> list[Tensor]:
    """Attention with a mistake that someone shipped."""
    if fault == "block-local log-sum-exp":
        right = CpuFlash.backward

        def local(self: Any, grad: Any, q: Any, k: Any, v: Any, output: Any, lse: Any, block: Block) -> Any:
            own, own_lse = self.forward(q, k, v, block)
            return right(self, grad, q, k, v, own, own_lse, block)

        CpuFlash.backward = local
    elif fault == "keys stay where they are":
        ring.Shift = lambda tensor, shape, group: type("Stays", (), {"wait": lambda _: tensor.new_zeros(shape)})()
    elif fault == "position of the shard instead of the sequence":
        case = replace(case, layout="contiguous")
        whole = ring.visible_pairs
        ring.visible_pairs = lambda q, k, causal, layer: whole(q, k, causal and q == k, layer)
    return sharded_results([case])[0]


@pytest.mark.parametrize(
    "fault", ["block-local log-sum-exp", "keys stay where they are", "position of the shard instead of the sequence"]
)
def test_a_planted_mistake_is_seen(fault: str) -> None:
    case = replace(CASE, layout="contiguous") if fault.startswith("position") else CASE
    found = whole_results(case, run_on_ranks(_planted, 2, fault, CASE))
    errors = [float((m - w).norm() / w.norm()) for m, w in zip(found, dense_results(case), strict=True)]
    assert max(errors) > 0.05, errors


def _projector(exact: bool) -> Tensor:
    """Embeddings made on one rank and used on another: the gradient must find its way back."""
    rank, group = dist.get_rank(), dist.group.WORLD
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    own = weight * (rank + 1)
    if exact:
        everyone = AllToAll.apply(torch.stack([own, own]), (1, 1), (1, 1), group)
    else:
        everyone = torch.zeros(2, 2, dtype=torch.float64)
        everyone[rank] = own
        sum_in_place(everyone, group)  # the values are right, the graph ends here for what came from elsewhere
    everyone[1 - rank].sum().backward()
    return sum_in_place(torch.zeros(2) if weight.grad is None else weight.grad, group)


def test_an_all_reduce_in_place_of_an_autograd_collective_loses_gradients() -> None:
    assert run_on_ranks(_projector, 2, True)[0].tolist() == [3.0, 3.0]
    assert run_on_ranks(_projector, 2, False)[0].tolist() == [0.0, 0.0]


MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (3, 1)]
DOCUMENTS = [(24,), (5, 9, 2), (1, 1, 13, 1), (3, 30, 4, 1, 7)]  # of one token; over two and over all ranks; odd
NAMES = ("output", "query", "key", "value")


def layouts(ring: int, ulysses: int) -> list[Attention]:
    """Every combination that a mesh admits, uneven and empty shards included."""
    heads = [(4, 4), (4, 2), (4, 1), (9, 3)]
    cases = [
        Attention(lengths, ring, ulysses, *counts, causal, layout)
        for lengths, counts, (causal, layout) in product(
            DOCUMENTS, heads, [(True, "contiguous"), (False, "contiguous"), (True, "zigzag"), (False, "zigzag")]
        )
    ]
    ranks = ring * ulysses
    uneven = (1, *(3,) * (ranks - 1)) if ranks > 1 else (0,)
    empty = (0,) * (ranks - 1)
    given = [(*uneven[:-1], 45 - sum(uneven[:-1])), (45, *empty), (*empty, 45)]
    cases += [
        Attention((3, 30, 4, 1, 7), ring, ulysses, 4, 2, causal, rank_tokens=rank_tokens)
        for rank_tokens, causal in product(given, (True, False))
    ]
    return cases + [replace(case, gather=True) for case in cases if ring > 1]


def errors(ring: int, ulysses: int, cases: list[Attention]) -> dict[Attention, float]:
    """The largest deviation of each case from dense attention, relative to the largest value."""
    of_ranks = run_on_ranks(sharded_results, ring * ulysses, cases)
    found = {}
    for number, case in enumerate(cases):
        whole = whole_results(case, [results[number] for results in of_ranks])
        pairs = zip(whole, dense_results(case), strict=True)
        found[case] = max(float((mine.double() - wanted).abs().max() / wanted.abs().max()) for mine, wanted in pairs)
    return found


@pytest.mark.parametrize(("ring", "ulysses"), slow_but(MESHES, (1, 1), (1, 2), (2, 2)))
def test_equals_dense_attention_in_double_precision(ring: int, ulysses: int) -> None:
    found = errors(ring, ulysses, layouts(ring, ulysses))
    worst = max(found, key=lambda case: found[case])
    assert found[worst] < 1e-12, worst


@pytest.mark.parametrize(("ring", "ulysses"), [slow(4, 1), slow(2, 2), (1, 4)])
def test_equals_dense_attention_in_single_precision(ring: int, ulysses: int) -> None:
    found = errors(ring, ulysses, [replace(case, dtype=torch.float32) for case in layouts(ring, ulysses)])
    worst = max(found, key=lambda case: found[case])
    assert found[worst] < 1e-5, worst


@pytest.mark.parametrize(("ring", "ulysses"), [slow(4, 1), (2, 2), slow(1, 4)])
def test_rounding_in_16_bits_is_that_of_one_rank(ring: int, ulysses: int) -> None:
    """The error of flash attention's own tests: at most 2.5 × that of dense attention in the same format."""
    cases = [replace(case, dtype=torch.bfloat16) for case in layouts(ring, ulysses) if sum(case.lengths) > 20]
    of_ranks = run_on_ranks(sharded_results, ring * ulysses, cases)
    for number, case in enumerate(cases):
        whole = whole_results(case, [results[number] for results in of_ranks])
        exact, rough = dense_results(case), dense_results(case, torch.bfloat16)
        for name, mine, theirs, wanted in zip(NAMES, whole, rough, exact, strict=True):
            error, allowed = ((s.double() - wanted).norm() for s in (mine, theirs))
            assert error < 2.5 * allowed + 1e-3 * wanted.norm(), (name, case)


LAYERS = [
    *(LayerRule(window=w) for w in (2, 4, 7)),
    LayerRule(chunk=5),
    LayerRule(window=3, chunk=5),
    LayerRule(softcap=0.7),
    LayerRule(4, None, 0.7),
]
LONG = (3, 290, 4)  # more queries than a masked call takes


@pytest.mark.parametrize(("ring", "ulysses"), [slow(2, 1), slow(1, 2), (2, 2), slow(3, 1)])
def test_windows_chunks_and_soft_caps_equal_dense_attention(ring: int, ulysses: int) -> None:
    cases = [
        Attention((3, 30, 4, 1, 7), ring, ulysses, 4, 2, layout=layout, layer=layer)
        for layer, layout in product(LAYERS, ("contiguous", "zigzag"))
    ]
    cases += [Attention(LONG, ring, ulysses, 4, 2, layer=layer) for layer in (LAYERS[2], LayerRule(window=150))]
    cases += [Attention((3, 30, 4), ring, ulysses, 4, 2, value_dim=dim, layer=layer) for dim, layer in WIDTHS]
    cases += [replace(case, gather=True) for case in cases[:3] if ring > 1]
    found = errors(ring, ulysses, cases)
    worst = max(found, key=lambda case: found[case])
    assert found[worst] < 1e-12, worst


WIDTHS = [(5, PLAIN), (12, PLAIN), (5, LayerRule(window=4))]


def test_blocks_between_ulysses_ranks_equal_dense_attention() -> None:
    cases = [
        Attention((3, 30, 4, 1, 7), 1, 2, 4, 2, layer=layer, block_rule=rule)
        for layer, rule in product([PLAIN, LAYERS[1], LAYERS[3], LAYERS[5]], ("bounded", "windowed", "free"))
    ]
    cases.append(replace(cases[0], rank_tokens=(45, 0)))
    found = errors(1, 2, cases)
    worst = max(found, key=lambda case: found[case])
    assert found[worst] < 1e-12, worst


def _refused(case: Attention) -> str:
    try:
        sharded_results([case])
    except ValueError as error:
        return str(error)
    return ""


def test_blocks_of_a_segment_in_the_ring_are_refused_on_all_ranks() -> None:
    case = Attention((3, 30, 4), 2, 1, block_rule="bounded")
    for message in run_on_ranks(_refused, 2, case):
        assert "blocks of 37 tokens, and segments divided over ring=2 ranks" in message


def test_windows_without_causality_are_refused_on_all_ranks() -> None:
    case = Attention((3, 30, 4), 2, 1, causal=False, layer=LayerRule(window=3))
    for message in run_on_ranks(_refused, 2, case):
        assert "not causal" in message


def _twice(case: Attention) -> bool:
    first, second = sharded_results([case, case])
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize("gather", [False, True])
def test_repeats_to_the_bit(gather: bool) -> None:
    case = Attention((3, 30, 4, 1, 7), 2, 2, 4, 2, True, "zigzag", gather=gather, dtype=torch.float32)
    assert run_on_ranks(_twice, 4, case) == [True] * 4
