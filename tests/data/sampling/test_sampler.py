"""Which samples each step has, in every order."""

import json
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import experiments.baselines  # noqa: F401  it registers length_group and device_group
from dhp.core.errors import DataError
from dhp.data.balance import methods
from dhp.data.balance.methods import isf
from dhp.data.balance.packs import Limits, Loads, Packs
from dhp.data.media.sources import Sound, Video
from dhp.data.read.records import Part, Record, Turn
from dhp.data.sampling.balanced_sampler import BalancedSampler, WindowPlanner, fullest_first
from dhp.data.sampling.dataset import OTHERS, OWN, Exchanged, partners
from dhp.data.sampling.sampler import (
    BalanceSettings,
    BatchLayout,
    RandomSampler,
    Sampler,
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


METHODS = ("length_group", "device_group", "isf", "balanced")
BALANCED_LAYOUT = BatchLayout(replicas=2, micro_batches=3, micro_batch_size=4)


@dataclass
class Made:
    """A dataset of given lengths; asked: what was looked at."""

    vision: np.ndarray
    text: np.ndarray
    asked: list[np.ndarray] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.text)

    def loads(self, indices: np.ndarray, epoch: int) -> Loads:
        self.asked.append(indices)
        return Loads(self.vision[indices], self.text[indices])

    def defects(self, indices: np.ndarray, epoch: int) -> list[str]:
        return [f"sample {index} is bad" for index in indices]


def made(samples: int = 1003, bad: tuple[int, ...] = (), seed: int = 0) -> Made:
    rng = np.random.default_rng(seed)
    vision = 64 * rng.choice(4, samples, p=(0.2, 0.6, 0.1, 0.1))
    text = vision + rng.lognormal(4.0, 0.8, samples).astype(np.int64) + 1
    text[list(bad)] = vision[list(bad)] = 0
    return Made(vision, text)


def sampler(
    dataset: Made, method: str, layout: BatchLayout = BALANCED_LAYOUT, skip: bool = False, **more
) -> BalancedSampler:
    return BalancedSampler(dataset, BalanceSettings(method, **more), layout, 7, "skip" if skip else "error")


def seen(batch: StepBatch) -> list[int]:
    return [index for row in batch.samples for slot in row for index in slot]


def rows(batch: StepBatch) -> list[tuple[int, ...]]:
    return [slot for row in batch.samples for slot in row]


def rows_of_step(batch: StepBatch) -> list[tuple[int, ...]]:
    """In no order: which micro-batch has which row goes with the replicas."""
    return sorted(rows(batch))


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("method", METHODS)
def test_each_epoch_shows_each_sample_once_in_steps_of_a_fixed_number_of_rows(method: str, window: int | None) -> None:
    source = sampler(made(), method, window=window)
    first, both = source.steps(1), source.steps(2)
    batches = [source.batch(step) for step in range(both)]
    for epoch, steps in ((0, batches[:first]), (1, batches[first:])):
        assert all(batch.epoch == epoch for batch in steps)
        assert sorted(index for batch in steps for index in seen(batch)) == list(range(1003))
        assert all(len(batch.samples) == 3 and all(len(row) == 2 for row in batch.samples) for batch in steps)
        assert all(slot for batch in steps[:-1] for slot in rows(batch))  # only the last may have empty ones
        done = [batch.done for batch in steps]
        assert done == sorted(done) and epoch < done[0] and done[-1] == epoch + 1
    assert [seen(b) for b in batches[:first]] != [seen(b) for b in batches[first : 2 * first]]


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("bad", [(), (3, 500, 501, 1002)])
def test_the_epoch_that_is_told_is_the_share_of_samples_seen(window: int | None, bad: tuple[int, ...]) -> None:
    source, shown = sampler(made(bad=bad), "balanced", skip=True, window=window), 0
    steps = source.steps(1)
    for step in range(steps - 1):
        batch = source.batch(step)
        shown += len(seen(batch))
        # Defective samples count when they are named, or as soon as their window is planned.
        assert shown <= round(1003 * batch.done) <= shown + len(bad)
        assert bad or batch.done == shown / 1003
    assert source.batch(steps - 1).done == 1


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("method", ["random", *METHODS])
@pytest.mark.parametrize("stop", [1, 17, 50])
def test_another_number_of_replicas_goes_on_without_losing_or_repeating_a_sample(
    method: str, window: int | None, stop: int
) -> None:
    def make(replicas: int) -> Sampler:
        layout = BatchLayout(replicas, 6 // replicas, 4)
        if method == "random":
            return RandomSampler(1003, layout, 7, shuffle=True)
        return sampler(made(), method, layout, window=window)

    whole, begun, resumed = make(2), make(2), make(6)
    before = list(islice(begun, stop))
    resumed.load_state_dict(begun.state_dict())
    after = list(islice(resumed, 80 - stop))
    assert [rows_of_step(batch) for batch in before + after] == [rows_of_step(whole.batch(step)) for step in range(80)]
    assert len(after[0].samples) == 1 and len(after[0].samples[0]) == 6


def test_limits_are_known_before_any_step_is() -> None:
    planned = sampler(made(), "isf")
    planned.batch(0)
    assert sampler(made(), "isf").limits == planned.limits is not None


def test_a_state_of_other_data_is_refused() -> None:
    state = sampler(made(), "isf").state_dict()
    for other, told in (
        (sampler(made(), "balanced"), "balance was isf and is balanced"),
        (sampler(made(1002), "isf"), "samples was 1003 and is 1002"),
        (sampler(made(seed=1), "isf"), "checksum of the lengths was"),
        (sampler(made(), "isf", replace(BALANCED_LAYOUT, micro_batches=2)), "rows was 6 and is 4"),
        (sampler(made(), "isf", text=5000), "limits was"),
        (RandomSampler(1003, BALANCED_LAYOUT, 7, True), "balance was isf and is random"),
    ):
        with pytest.raises(DataError, match=told):
            other.load_state_dict(state)


@pytest.mark.parametrize("window", [None, 100])
def test_bad_samples_are_named_once_an_epoch_and_move_no_other_out(window: int | None) -> None:
    bad = (3, 500, 501, 1002)
    source = sampler(made(bad=bad), "balanced", skip=True, window=window)
    batches = [source.batch(step) for step in range(source.steps(1))]
    assert sorted(index for batch in batches for index in seen(batch)) == sorted(set(range(1003)) - set(bad))
    assert sorted(text for batch in batches for text in batch.defects) == sorted(f"sample {i} is bad" for i in bad)
    with pytest.raises(DataError, match=r"^sample (3|500|501|1002) is bad$"):
        sampler(made(bad=bad), "balanced").steps(1)


@pytest.mark.parametrize("bad", [20, 40])  # of 50 samples, in three windows: all of the last one, of the last two
def test_windows_of_bad_samples_at_the_end_of_an_epoch(bad: int) -> None:
    layout = BatchLayout(1, 1, 2)
    last = tuple(epoch_order(50, 7, 0, True)[-bad:].tolist())
    source = sampler(made(50, bad=last), "length_group", layout, skip=True, window=20)
    batches = [source.batch(step) for step in range((50 - bad) // 2 + 1)]
    assert [batch.epoch for batch in batches] == [0] * (len(batches) - 1) + [1]
    assert batches[-2].done == 1 and sum(len(batch.defects) for batch in batches[:-1]) == bad
    again = sampler(made(50, bad=last), "length_group", layout, skip=True, window=20)
    again.batch(len(batches))
    assert [again.batch(step) for step in range(len(batches))] == batches  # whatever is planned already


def test_a_state_of_other_rows_of_the_same_data_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state = sampler(made(), "isf").state_dict()
    fewer = lambda loads, limits, *more: isf(loads, replace(limits, passes=3), *more)
    monkeypatch.setitem(methods.BALANCE_METHODS, "isf", fewer)
    with pytest.raises(DataError, match=r"checksum of the rows was \d+ and is \d+ \(another release of dhp"):
        sampler(made(), "isf").load_state_dict(state)


def test_nothing_but_bad_samples() -> None:
    nothing = Made(np.zeros(5, np.int64), np.zeros(5, np.int64))
    with pytest.raises(DataError, match="not one sample of the datasets can be used"):
        sampler(nothing, "isf", skip=True).batch(0)


def test_a_window_is_measured_while_the_one_before_it_is_trained_on() -> None:
    """And no window earlier. With every step comes an equal share."""
    dataset = made()
    source = sampler(dataset, "balanced", window=240)
    order = epoch_order(1003, 7, 0, True)
    for step in range(8):  # of about 24 samples
        source.batch(step)
        known = set(np.concatenate(dataset.asked).tolist())
        assert known >= set(order[: 240 + 24 * step].tolist())
        assert known <= set(order[: 240 + 24 * (step + 2)].tolist())
    source.batch(11)
    assert set(np.concatenate(dataset.asked).tolist()) <= set(order[:720].tolist())


def test_lengths_that_changed_in_the_window_it_is_in_are_noticed() -> None:
    """Such a run would lose samples and repeat others."""
    dataset, other = made(), made()
    source = sampler(dataset, "balanced", window=240)
    late = [next(source) for _ in range(23)] and source.state_dict()
    other.text[epoch_order(1003, 7, 0, True)[600]] += 1
    with pytest.raises(DataError, match="checksum of the lengths was .* .images, the tokenizer or what decides"):
        sampler(other, "balanced", window=240).load_state_dict(late)


@pytest.mark.parametrize("number", [5, 300])  # in the first window, in the second; the checkpoint is in the third
def test_lengths_that_changed_in_windows_that_were_seen_change_nothing(number: int) -> None:
    dataset, other = made(), made()
    source = sampler(dataset, "balanced", window=240)
    late = [next(source) for _ in range(23)] and source.state_dict()
    other.text[epoch_order(1003, 7, 0, True)[number]] += 1
    again = sampler(other, "balanced", window=240)
    again.load_state_dict(late)
    assert [rows(next(again)) for _ in range(17)] == [rows(source.batch(step)) for step in range(23, 40)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [(), (3, 500, 501, 1002)])
@pytest.mark.parametrize("stop", [1, 12, 23, 43, 60])  # the last two in the second epoch
def test_a_resumed_run_plans_from_the_window_it_is_in(
    method: str, bad: tuple[int, ...], stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = lambda: sampler(made(bad=bad), method, skip=True, window=240)
    whole, begun, resumed = make(), make(), make()
    for _ in range(stop):
        next(begun)
    state = json.loads(json.dumps(begun.state_dict()))  # as a checkpoint has it
    planned: list[tuple[int, int]] = []
    plan = WindowPlanner.plan

    def noted(self: WindowPlanner, indices: np.ndarray, epoch: int, window: int) -> object:
        planned.append((epoch, window))
        return plan(self, indices, epoch, window)

    monkeypatch.setattr(WindowPlanner, "plan", noted)
    resumed.load_state_dict(state)
    assert planned[0] == (state["window"]["epoch"], state["window"]["window"]) and len(planned) <= 2
    after = [next(resumed) for _ in range(90 - stop)]
    expected = [whole.batch(step) for step in range(stop, 90)]
    assert [rows(batch) for batch in after] == [rows(batch) for batch in expected]
    assert [(batch.done, batch.defects) for batch in after] == [(batch.done, batch.defects) for batch in expected]
    assert json.loads(json.dumps(resumed.state_dict())) == json.loads(json.dumps(whole.state(90)))


def test_a_first_window_of_bad_samples_alone_is_no_obstacle_to_resuming() -> None:
    bad = tuple(epoch_order(1003, 7, 0, True)[:30].tolist())
    make = lambda: sampler(made(bad=bad), "balanced", skip=True, window=30)
    whole, begun, resumed = make(), make(), make()
    for _ in range(7):
        next(begun)
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert [rows(next(resumed)) for _ in range(9)] == [rows(whole.batch(step)) for step in range(7, 16)]
    assert resumed.limits == whole.limits


def test_what_a_resumed_run_needs_first() -> None:
    source = sampler(made(), "balanced", window=240)
    order = epoch_order(1003, 7, 0, True)
    assert source.first(0).tolist() == order[:240].tolist()
    assert source.first(20).tolist() == order[:720].tolist()
    assert source.first(10**6).tolist() == order.tolist()
    assert sampler(made(), "balanced").first(0).tolist() == order.tolist()


def test_a_resumed_run_catches_up_with_the_window_it_is_in() -> None:
    dataset = made()
    source = sampler(dataset, "balanced", window=240)
    source.batch(8)  # without the eight before it
    order = epoch_order(1003, 7, 0, True)
    assert set(np.concatenate(dataset.asked).tolist()) >= set(order[: 240 + 24 * 7].tolist())


def test_a_step_asked_for_again_asks_for_the_same_lengths() -> None:
    """A step depends on its number alone, and so does what it looks up: not on which steps came before."""
    dataset = made()
    source = sampler(dataset, "balanced", window=240)
    asked = []
    for step in (3, 5, 3):
        source.batch(step)
        asked.append(dataset.asked[-2].tolist())  # the last are the step's own
    assert asked[0] == asked[2] and asked[0] == asked[1][: len(asked[0])] != asked[1]


def test_what_is_planned_is_balanced() -> None:
    """Against random rows of as many samples: less text on the longest rank of a step."""
    dataset = made(20_000)

    def idle(source: Sampler) -> float:
        found = []
        for step in range(200):
            loads = [dataset.text[list(slot)].sum() for slot in rows(source.batch(step))]
            found.append(1 - np.mean(loads) / np.max(loads))
        return float(np.mean(found))

    random = idle(RandomSampler(20_000, BALANCED_LAYOUT, 7, True))
    assert random > 0.2
    assert idle(sampler(dataset, "isf")) < 0.08
    assert idle(sampler(dataset, "balanced")) < 0.01


@pytest.mark.parametrize(("method", "even"), [("balanced", True), ("isf", False)])
def test_micro_batches_of_a_step_have_as_much_vision(method: str, even: bool) -> None:
    """ISF's rows stay as published."""
    dataset = made(20_000)
    source = sampler(dataset, method, BatchLayout(replicas=4, micro_batches=8, micro_batch_size=4))
    over = []
    for step in range(50):
        loads = [sum(dataset.vision[list(slot)].sum() for slot in row) for row in source.batch(step).samples]
        over.append(max(loads) - min(loads))
    assert bool(np.median(over) <= 64) is even  # a picture's; few steps have rows of unlike text, which stay


def test_limits_come_from_the_lengths_or_are_given() -> None:
    loads = Loads(np.array([0, 100, 200]), np.array([10, 150, 290]))
    assert BalanceSettings("isf").limits(loads, 4) == Limits(800, 600, 4, 775, 582, soft=True)
    assert BalanceSettings("balanced").limits(loads, 4) == Limits(400, 600, 4, 388, 582, soft=True)
    given = BalanceSettings("isf", vision=9, text=8192, full_vision=8, full_text=8000)
    assert given.limits(loads, 4) == Limits(9, 8192, 4, 8, 8000)
    assert BalanceSettings("isf", vision=9, text=4096).limits(loads, 4).full == (9, 3968)  # as published


@pytest.mark.parametrize(("method", "least"), [("balanced", 3.95), ("isf", 3.6)])
def test_rows_hold_about_so_many_samples_in_the_mean(method: str, least: float) -> None:
    """As docs/data.md says: isf a little less."""
    dataset = made(20_000)
    loads = Loads(dataset.vision, dataset.text)
    packs = methods.BALANCE_METHODS[method](loads, BalanceSettings(method).limits(loads, 4), 2, 0)
    assert least <= len(dataset) / len(packs) <= 4


def test_limits_by_the_papers_rule() -> None:
    loads = Loads(np.array([9, 0, 18, 9]), np.array([600, 296, 4096, 1000]))  # 36 tiles of 5,992 tokens
    paper = BalanceSettings("isf", rule="paper", isf_passes=3)
    assert paper.limits(loads, 4) == Limits(25, 4096, 4, 25, 3968, passes=3)
    assert replace(paper, text=2996).limits(loads, 4) == Limits(18, 2996, 4, 18, 2868, passes=3)
    assert replace(paper, vision=7, full_vision=6, full_text=9).limits(loads, 1) == Limits(7, 4096, 1, 6, 9, passes=3)
    few = Loads(np.zeros(2, np.int64), np.array([20, 30]))
    assert paper.limits(few, 4) == Limits(1, 30, 4, 1, 1, passes=3)
    assert Limits(9, 4096).full == (9, 3968)


def test_each_window_of_each_epoch_is_dealt_from_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def method(loads: Loads, limits: Limits, rows: int, seed: int) -> object:
        seeds.append(seed)
        return isf(loads, limits, rows, seed)

    monkeypatch.setattr("dhp.data.sampling.balanced_sampler.choose_method", lambda *_: method)
    source = sampler(made(300), "isf", window=100)
    for step in range(source.steps(2)):
        source.batch(step)
    assert len(set(seeds)) == len(seeds) == 6


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
    assert [rows_of_step(batch) for batch in before + after] == [rows_of_step(whole.batch(step)) for step in range(60)]


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
    monkeypatch.setattr("dhp.data.sampling.balanced_sampler.fullest_first", lambda packs, loads, width: packs)
    with pytest.raises(DataError, match=r"checksum of the rows was \d+ and is \d+ \(another release of dhp"):
        sampler(made(), "isf", fullest_first=True).load_state_dict(state)


def test_nothing_is_exchanged_where_there_is_nothing() -> None:
    nothing = Packs(np.arange(0), np.arange(0))
    assert len(fullest_first(nothing, Loads(np.arange(0), np.arange(0)), 3)) == 0
    source = sampler(made(5, bad=(0, 1, 2, 3)), "isf", skip=True, fullest_first=True)
    assert [seen(batch) for batch in steps_of(source)] == [[4]]


A, B, C, D = (Path(f"{name}.png") for name in "abcd")


def record(number: int, *parts: Part) -> Record:
    turns = (Turn("user", (*parts, f"question {number}")), Turn("assistant", (f"answer {number}",)))
    return Record("one", number, f"one: row {number}", turns)


@dataclass
class Listed:
    records: list[Record | None]

    def __len__(self) -> int:
        return len(self.records)

    def record(self, index: int, epoch: int = 0) -> Record:
        found = self.records[index]
        if found is None:
            raise DataError("bad")
        return found


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        ([(1, 7), (1, 8), (1, 9)], {0: 1, 1: 2, 2: 0}),
        ([(1, 7), (1, 7), (1, 8), (1, 7)], {0: 2, 1: 2, 2: 3, 3: 2}),  # never its own once more
        ([(1, 7), (2, 8), (1, 9), (2, 8), (0, 0)], {0: 2, 2: 0}),
        ([(1, 7), None, (1, 8)], {0: 2, 2: 0}),
        ([(1, 7)], {}),
        ([], {}),
    ],
)
def test_each_gets_the_next_others(shown: list[tuple[int, int] | None], wanted: dict[int, int]) -> None:
    assert partners(shown) == wanted


def test_images_change_and_all_else_stays() -> None:
    video, sound = Video(Path("v.mp4")), Sound(Path("s.wav"))
    rows = Listed([record(1, A, video, B), record(2), record(3, sound, C, D), record(4, A)])
    own, others = Exchanged(rows, OWN, skips=False), Exchanged(rows, OTHERS, skips=False)
    assert [own.record(at) for at in range(len(own))] == [rows.records[0], rows.records[2]]
    assert len(others) == 2
    assert others.record(0) == record(1, C, video, D) and others.record(1) == record(3, sound, A, B)


def test_images_of_later_turns_too() -> None:
    first = replace(record(1, A), turns=(*record(1, A).turns, Turn("user", (B, "and?")), Turn("assistant", ("no",))))
    others = Exchanged(Listed([first, record(2, C, D)]), OTHERS, skips=False)
    assert [turn.parts for turn in others.record(0).turns] == [(C, "question 1"), ("answer 1",), (D, "and?"), ("no",)]


def test_bad_samples_and_datasets_without_images() -> None:
    rows = Listed([record(1, A), None, record(3, B)])
    assert len(Exchanged(rows, OWN, skips=True)) == 2
    with pytest.raises(DataError, match="bad"):
        Exchanged(rows, OWN, skips=False)
    with pytest.raises(DataError, match="none of 2 samples shows images that another one could show"):
        Exchanged(Listed([record(1, A), record(2)]), OWN, skips=False)
