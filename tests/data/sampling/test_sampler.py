from __future__ import annotations

import numpy as np
import pytest

from dhp.core.errors import DataError
from dhp.data.sampling.sampler import (
    BatchLayout,
    RandomSampler,
    StepBatch,
    epoch_of,
    epoch_order,
    slots,
    step_indices,
    steps_per_epoch,
)

LAYOUT = BatchLayout(replicas=2, micro_batches=3, micro_batch_size=2)


def test_batch_size_is_the_product_of_the_layout():
    assert LAYOUT.batch_size == 12


def test_a_whole_batch_fills_micro_batches_then_replicas():
    assert slots(range(100, 112), LAYOUT) == [
        [(100, 101), (102, 103)],
        [(104, 105), (106, 107)],
        [(108, 109), (110, 111)],
    ]


@pytest.mark.parametrize(
    "count, expected",
    [
        (0, [[(), ()], [(), ()], [(), ()]]),
        (1, [[(0,), ()], [(), ()], [(), ()]]),
        (5, [[(0, 1), (2, 3)], [(4,), ()], [(), ()]]),
        (11, [[(0, 1), (2, 3)], [(4, 5), (6, 7)], [(8, 9), (10,)]]),
    ],
)
def test_a_short_batch_leaves_the_later_slots_short(count, expected):
    assert slots(range(count), LAYOUT) == expected


def test_each_index_goes_where_the_formula_says():
    for replica_row in enumerate(slots(range(12), LAYOUT)):
        micro, row = replica_row
        for replica, indices in enumerate(row):
            assert all((i // 4, i // 2 % 2) == (micro, replica) for i in indices)


def test_order_is_a_permutation_that_depends_on_seed_and_epoch():
    orders = {(seed, epoch): epoch_order(50, seed, epoch, True).tolist() for seed in (0, 1) for epoch in (0, 1)}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 4
    assert orders[0, 1] == epoch_order(50, 0, 1, True).tolist()
    assert epoch_order(4, 9, 9, False).tolist() == [0, 1, 2, 3]


def test_the_order_of_a_seed_is_fixed_for_good():
    assert epoch_order(8, 0, 0, True).tolist() == np.random.default_rng([0, 0]).permutation(8).tolist()


@pytest.mark.parametrize("n, steps", [(1, 1), (12, 1), (13, 2), (24, 2), (25, 3)])
def test_steps_per_epoch_drops_nothing(n, steps):
    assert steps_per_epoch(n, LAYOUT) == steps
    seen = [i for step in range(steps) for i in step_indices(step, n, LAYOUT, 0, True)]
    assert sorted(seen) == list(range(n))


def test_steps_run_on_into_the_next_epoch():
    assert [epoch_of(step, 13, LAYOUT) for step in range(5)] == [0, 0, 1, 1, 2]
    assert step_indices(1, 13, LAYOUT, 0, False) == (12,)
    assert step_indices(2, 13, LAYOUT, 0, False) == tuple(range(12))


def test_a_step_says_where_it_stands_and_what_it_has():
    source = RandomSampler(30, LAYOUT, 7, shuffle=False)
    assert (source.steps(1), source.steps(3)) == (3, 9)
    samples = (((12, 13), (14, 15)), ((16, 17), (18, 19)), ((20, 21), (22, 23)))
    assert source.batch(1) == StepBatch(step=1, epoch=0, done=2 / 3, samples=samples)
    assert source.batch(2).samples == (((24, 25), (26, 27)), ((28, 29), ()), ((), ()))
    assert [(batch.epoch, batch.done) for batch in map(source.batch, (2, 3))] == [(0, 1.0), (1, 4 / 3)]


def test_seed_and_shuffling_decide_the_order():
    first = lambda seed, shuffle: RandomSampler(30, LAYOUT, seed, shuffle).batch(0).samples
    assert first(7, True) == first(7, True) != first(8, True) and first(7, False) == first(8, False)


def test_steps_are_handed_out_in_order_and_a_state_goes_on_behind_them():
    source, other = RandomSampler(30, LAYOUT, 7, True), RandomSampler(30, BatchLayout(1, 6, 2), 7, True)
    assert [next(source).step for _ in range(4)] == [0, 1, 2, 3] and source.position == 4
    state = source.state_dict()
    assert state["step"] == 4
    other.load_state_dict(state)
    assert (next(other).step, other.position) == (4, 5)
    for changed in (RandomSampler(30, LAYOUT, 8, True), RandomSampler(29, LAYOUT, 7, True)):
        with pytest.raises(DataError, match="has another order now: (seed was 7 and is 8|samples was 30 and is 29)"):
            changed.load_state_dict(state)
        assert changed.position == 0
