"""Attention over a ring × Ulysses mesh against dense attention: every layout, uneven shards, shared keys."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from dhp.parallel.attention.visibility import PLAIN, LayerRule
from tests.helpers.attention import Attention, dense_results, sharded_results, whole_results
from tests.helpers.ranks import run_on_ranks
from tests.helpers.rows import slow, slow_but

MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (3, 1)]
DOCUMENTS = [(24,), (5, 9, 2), (1, 1, 13, 1), (3, 30, 4, 1, 7)]  # of one token; over two and over all ranks; odd
NAMES = ("output", "query", "key", "value")


def layouts(ring: int, ulysses: int) -> list[Attention]:
    """Every combination that a mesh admits, uneven and empty shards included."""
    heads = [(4, 4), (4, 2), (4, 1)]
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


@pytest.mark.parametrize(("ring", "ulysses"), slow_but(MESHES, (1, 1), (2, 1), (1, 2), (2, 2)))
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


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2), slow(3, 1)])
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
