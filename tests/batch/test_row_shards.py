"""Over how many of a row's ranks each sample is divided."""

from __future__ import annotations

import random

import pytest

from dhp.batch.assign_images import TOLERANCE
from dhp.batch.row_shards import ROOM, SequenceGroups, choose_groups, count_divided, divide_all, grouped_plan
from dhp.parallel.attention.shard_plan import ShardPlan, zigzag_plan

MESHES = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (3, 2)]  # ring × Ulysses


def _held(plan: ShardPlan) -> list[list[tuple[int, int, int]]]:
    return [[(p.segment, p.first, p.count) for p in shard] for of_ring in plan.shards for shard in of_ring]


@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
def test_all_over_all_is_the_two_ended_layout(ring: int, ulysses: int) -> None:
    lengths = (1, 30, 3, 17, 2)
    assert grouped_plan(lengths, ring, ulysses, divide_all(lengths, ring, ulysses)) == zigzag_plan(
        lengths, ring, ulysses
    )


def test_one_long_sample_is_shared_and_even_short_ones_are_not() -> None:
    assert choose_groups([1000], 2, 2, 100.0) == SequenceGroups((0,), ((), ()), ((), (), (), ()))
    assert choose_groups([10] * 8, 2, 2, 100.0).of_ranks == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_what_fits_the_ranks_of_a_ring_place_stays_there() -> None:
    assert choose_groups([100, 100], 2, 2, 1e9) == SequenceGroups((), ((0,), (1,)), ((), (), (), ()))


def test_a_long_one_beside_short_ones() -> None:
    groups = choose_groups([1000, *[100] * 16], 4, 1, 1e9)
    assert groups.shared == (0,)
    assert [len(held) for held in groups.of_ranks] == [4, 4, 4, 4]


def test_where_nothing_else_is_even_samples_are_divided() -> None:
    assert choose_groups([10, 7], 2, 1, 1e9).shared == (0, 1)
    # Even in cost would leave one rank with most of the tokens.
    groups = choose_groups([100, *[10] * 20], 2, 1, 100.0)
    tokens = [sum(count for _, _, count in shard) for shard in _held(grouped_plan([100, *[10] * 20], 2, 1, groups))]
    assert max(tokens) <= ROOM * 150


def test_divided_without_need_are_samples_that_one_rank_could_have() -> None:
    """Of 12 tokens over two ranks, six are an even share."""
    for lengths, tokens in (([7, 4, 1], 4), ([6, 4, 2], 12), ([8, 2, 2], 4)):
        assert count_divided(grouped_plan(lengths, 2, 1, divide_all(lengths, 2, 1))) == tokens
    assert count_divided(grouped_plan([6, 4, 2], 2, 1, SequenceGroups((), ((), ()), ((0,), (1, 2))))) == 0


@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
@pytest.mark.parametrize("crossover", [50.0, 1e9])
def test_every_token_is_somewhere_once_in_order_and_work_is_even(ring: int, ulysses: int, crossover: float) -> None:
    rng = random.Random(ring * 10 + ulysses)
    for _ in range(60):
        lengths = [rng.choice([1, 2, 5, 30, 90, 400]) for _ in range(rng.randint(1, 25))]
        groups = choose_groups(lengths, ring, ulysses, crossover)
        plan = grouped_plan(lengths, ring, ulysses, groups)
        held = _held(plan)
        tokens = sorted((s, t) for shard in held for s, first, count in shard for t in range(first, first + count))
        assert tokens == [(s, t) for s, length in enumerate(lengths) for t in range(length)]
        assert all(shard == sorted(shard) for shard in held)
        costs = [length * (1 + length / crossover) for length in lengths]
        shared = sum(costs[s] for s in groups.shared) / (ring * ulysses)
        in_rings = [sum(costs[s] for s in held) / ulysses for held in groups.of_rings]
        loads = [shared + in_rings[r // ulysses] + sum(costs[s] for s in own) for r, own in enumerate(groups.of_ranks)]
        assert max(loads) <= TOLERANCE * sum(costs) / (ring * ulysses) * (1 + 1e-9)
        assert max(len(shard) and sum(p[2] for p in shard) for shard in held) <= ROOM * sum(lengths) / len(held) + len(
            lengths
        )
