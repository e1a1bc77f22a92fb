"""The fullest steps come first, and nothing else about the data changes."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

import experiments.baselines  # noqa: F401  it registers length_group
from dhp.core.errors import DataError
from dhp.data.balance.packs import Loads, Packs
from dhp.data.sampling.balanced_sampler import BalancedSampler
from dhp.data.sampling.fullest_first import fullest_first
from dhp.data.sampling.sampler import BatchLayout, StepBatch
from tests.data.sampling.test_balanced_sampler import METHODS, Made, made, rows, sampler, seen

ONE, THREE = BatchLayout(1, 1, 4), BatchLayout(3, 1, 4)


def steps_of(source: BalancedSampler, epochs: int = 1) -> list[StepBatch]:
    return [source.batch(step) for step in range(source.steps(epochs))]


def tokens(dataset: Made, batch: StepBatch) -> list[tuple[int, int]]:
    """Of each row of a step, its tokens and image tokens."""
    return [(int(dataset.text[list(row)].sum()), int(dataset.vision[list(row)].sum())) for row in rows(batch)]


def images(dataset: Made, batch: StepBatch) -> int:
    return sum(vision for _, vision in tokens(dataset, batch))


@pytest.mark.parametrize("layout", [ONE, THREE, BatchLayout(2, 3, 4)])
@pytest.mark.parametrize("method", METHODS)
def test_the_first_epoch_begins_with_its_fullest_steps_and_goes_on_in_order(method: str, layout: BatchLayout) -> None:
    dataset = made()
    before, after = (steps_of(sampler(dataset, method, layout, fullest_first=on), 2) for on in (False, True))
    first = [rows(batch) for batch in after if not batch.epoch]
    whole = [batch for batch in after if not batch.epoch and all(rows(batch))]
    assert max(tokens(dataset, after[0])) == max(row for batch in whole for row in tokens(dataset, batch))
    assert max(images(dataset, b) for b in after[:2]) == max(images(dataset, batch) for batch in whole)
    plain = [rows(batch) for batch in before if not batch.epoch]
    assert sorted(first) == sorted(plain) and first != plain  # rows of a step stay together
    assert first[2:] == [step for step in plain if step not in first[:2]]
    assert [rows(b) for b in after if b.epoch] == [rows(b) for b in before if b.epoch]
    assert sorted(index for batch in after if not batch.epoch for index in seen(batch)) == list(range(1003))
    done = [batch.done for batch in after]
    assert done == sorted(done) and done[-1] == 2


def test_a_short_step_at_the_end_stays_there() -> None:
    """Though it has the longest row."""
    loads = Loads(np.array([0, 1, 0, 9, 0, 0, 50]), np.array([5, 3, 9, 9, 7, 7, 99]))
    packs = Packs(np.arange(7), np.arange(1, 8))
    assert fullest_first(packs, loads, 3).samples.tolist() == [3, 4, 5, 0, 1, 2, 6]
    assert fullest_first(packs, loads, 2).samples.tolist() == [2, 3, 0, 1, 4, 5, 6]
    assert fullest_first(packs, loads, 1).samples.tolist() == [6, 0, 1, 2, 3, 4, 5]
    assert fullest_first(packs, loads, 4).samples.tolist() == list(range(7))
    dataset = made(50)
    source = sampler(dataset, "length_group", THREE, fullest_first=True)
    plain = sampler(dataset, "length_group", THREE)
    last = source.steps(1) - 1
    assert not all(rows(source.batch(last))) and source.batch(last) == plain.batch(last)


def test_the_step_with_most_image_tokens_is_the_second_unless_it_is_the_first() -> None:
    packs = Packs(np.arange(6), np.arange(1, 7))
    text = np.array([1, 1, 1, 8, 1, 1])
    # Its most image tokens are those of all its rows, not of one.
    assert fullest_first(packs, Loads(np.array([0, 0, 0, 5, 3, 3]), text), 2).samples.tolist() == [2, 3, 4, 5, 0, 1]
    assert fullest_first(packs, Loads(np.array([0, 0, 0, 6, 3, 3]), text), 2).samples.tolist() == [2, 3, 0, 1, 4, 5]
    assert fullest_first(packs, Loads(np.zeros(6, np.int64), text), 2).samples.tolist() == [2, 3, 0, 1, 4, 5]
    # Of rows that are equally long the one with more image tokens.
    even = Loads(np.array([0, 0, 0, 1, 0, 2]), np.ones(6, np.int64))
    assert fullest_first(packs, even, 2).samples.tolist() == [4, 5, 0, 1, 2, 3]


@pytest.mark.parametrize("method", METHODS)
def test_of_windows_it_is_the_first_that_begins_with_its_fullest_steps(method: str) -> None:
    dataset = made()
    before, after = (sampler(dataset, method, fullest_first=on, window=240) for on in (False, True))
    plain, ours = steps_of(before), steps_of(after)
    assert sorted(index for batch in ours for index in seen(batch)) == list(range(1003))
    differing = [step for step, (a, b) in enumerate(zip(plain, ours, strict=True)) if rows(a) != rows(b)]
    end = max(differing) + 1
    assert 1 < end <= 240 // 4 // 6 + 1  # steps of the first window
    assert sorted(map(rows, plain[:end])) == sorted(map(rows, ours[:end]))
    assert max(tokens(dataset, ours[0])) == max(row for batch in ours[:end] for row in tokens(dataset, batch))


@pytest.mark.parametrize("window", [None, 240])
@pytest.mark.parametrize("stop", [1, 2, 17])
def test_a_run_goes_on_in_the_middle_of_an_epoch_with_any_number_of_replicas(window: int | None, stop: int) -> None:
    make = lambda replicas: sampler(
        made(), "balanced", BatchLayout(replicas, 6 // replicas, 4), window=window, fullest_first=True
    )
    whole, begun, resumed = make(2), make(2), make(6)
    before = list(islice(begun, stop))
    resumed.load_state_dict(begun.state_dict())
    after = list(islice(resumed, 60 - stop))
    assert [rows(batch) for batch in before + after] == [rows(whole.batch(step)) for step in range(60)]


@pytest.mark.parametrize("was", [False, True])
def test_a_run_that_began_otherwise_is_refused(was: bool) -> None:
    state = sampler(made(), "balanced", fullest_first=was).state_dict()
    with pytest.raises(
        DataError, match=rf"fullest_first was {was} and is {not was} \(data.fullest_first; .*Set what it"
    ):
        sampler(made(), "balanced", fullest_first=not was).load_state_dict(state)


def test_other_fullest_steps_of_the_same_data_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared are the rows that are handed out."""
    state = sampler(made(), "isf", fullest_first=True).state_dict()
    monkeypatch.setattr("dhp.data.sampling.window_plan.fullest_first", lambda packs, loads, width: packs)
    with pytest.raises(DataError, match=r"checksum of the rows was \d+ and is \d+ \(another release of dhp"):
        sampler(made(), "isf", fullest_first=True).load_state_dict(state)


def test_nothing_is_exchanged_where_there_is_nothing() -> None:
    nothing = Packs(np.arange(0), np.arange(0))
    assert len(fullest_first(nothing, Loads(np.arange(0), np.arange(0)), 3)) == 0
    source = sampler(made(5, bad=(0, 1, 2, 3)), "isf", skip=True, fullest_first=True)
    assert [seen(batch) for batch in steps_of(source)] == [[4]]
