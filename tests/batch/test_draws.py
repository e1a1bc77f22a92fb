"""Keys of what adapters draw: of a step's samples, wherever a layout puts them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from dhp.batch.row_shards import FILLER, runs_of_rows, runs_of_shard, sample_keys, with_keys
from dhp.core.axes import Degrees
from dhp.core.batch import StepData
from dhp.core.draws import keys_of
from dhp.core.parameters import AdapterSettings
from dhp.data.sampling.dataset import StepSamples
from tests.helpers.batches import mixed_step, step_with_one_window, step_without_image
from tests.helpers.layouts import Case, _slotted, make_sharder

ONE = Degrees()
DROPPING = tuple((part, AdapterSettings(2, 4.0, dropout=0.1)) for part in ("vision", "text"))
PLAIN = Case(ONE, ONE, 1, packing=True, lora=DROPPING)
LAYOUTS = [
    Case(ONE, ONE, 2, lora=DROPPING),
    Case(Degrees(data=2), Degrees(data=3), 2, lora=DROPPING),
    Case(Degrees(ulysses=2, ring=2), Degrees(ulysses=2, ring=2), 1, lora=DROPPING),
    Case(Degrees(ulysses=3), Degrees(data=2, ring=2), 1, lora=DROPPING, sequence_groups="auto"),
    Case(Degrees(data=3), Degrees(ulysses=4), 2, lora=DROPPING, tower_stages=2),
]


def numbers(data: StepData, part: str) -> Counter[int]:
    """Keys of all tokens of a part, over its ranks and micro-batches, but for what fills up."""
    runs = [run for of_ranks in data.work[part] for one in of_ranks for run in one.draws if run[0]]
    return Counter(keys_of(runs).tolist())


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
@pytest.mark.parametrize("make", [mixed_step, step_without_image, step_with_one_window])
def test_every_token_has_the_same_key_in_every_layout(case: Case, make, made_model: str) -> None:
    step = make()
    plain, other = (make_sharder(made_model, one).shard(_slotted(3, one, step)) for one in (PLAIN, case))
    for part, count in (("text", sum(len(s.input_ids) for s in step)), ("vision", sum(s.patches for s in step))):
        keys = numbers(plain, part)
        assert len(keys) == count and set(keys.values()) <= {1}  # none twice
        assert numbers(other, part) == keys
    for part in other.work:
        for work in (one for of_ranks in other.work[part] for one in of_ranks):
            given = work.tensors["input_ids"] if part == "text" else work.positions[:, 0]
            assert sum(count for _, _, count in work.draws) == given.numel()  # each row, with what fills up


def test_tokens_are_in_the_order_of_the_rows(made_model: str) -> None:
    """Padded ones between samples; of a rank that shares a row its own."""
    step = mixed_step()
    (lengths, first) = [len(sample.input_ids) for sample in step], Case(ONE, ONE, 1, lora=DROPPING)
    keys = sample_keys(_slotted(3, first, step), 0)[0][0]
    (padded,) = make_sharder(made_model, first).shard(_slotted(3, first, step)).work["text"][0]
    width = max(lengths)
    wanted = [run for key, n in zip(keys, lengths) for run in ((key, 0, n), (0, 0, width - n)) if run[2]]
    assert list(padded.draws) == wanted
    shared = replace(first, text=Degrees(ring=2))
    for rank, work in enumerate(make_sharder(made_model, shared).shard(_slotted(3, shared, step)).work["text"][0]):
        assert work.draws == tuple((keys[s], at, n) for s, at, n in work.shards[rank])


def test_parts_that_draw_nothing_get_no_keys(made_model: str) -> None:
    silent = replace(PLAIN, lora=(DROPPING[1],))
    data = make_sharder(made_model, silent).shard(_slotted(0, silent, mixed_step()))
    assert numbers(data, "text") and not any(one.draws for one in data.work["vision"][0])
    none = replace(PLAIN, lora=())
    data = make_sharder(made_model, none).shard(_slotted(0, none, mixed_step()))
    assert not any(one.draws for part in data.work for one in data.work[part][0])


def test_keys_differ_by_seed_step_sample_and_picture() -> None:
    step = mixed_step()
    keys = lambda number, seed, samples=step: sample_keys(_slotted(number, PLAIN, samples), seed)[0][0]
    every = [*keys(0, 0), *keys(1, 0), *keys(0, 1), *keys(0, 0, [replace(one, dataset="other") for one in step])]
    assert len(set(every)) == 16
    pictures = [key for sample in keys(0, 0) for key, _ in with_keys(sample, "abc")]
    assert len(set(pictures)) == 12 and [picture for _, picture in with_keys(None, "ab")] == ["a", "b"]


def test_a_sample_that_comes_twice_draws_twice() -> None:
    one, other = mixed_step()[:2]
    twice = StepSamples(0, 0, (((one, other), (one,)), ((), (one,))), ())
    ((first, second), (third,)), ((), (fourth,)) = sample_keys(twice, 0)
    assert len({first, second, third, fourth}) == 4
    swapped = StepSamples(0, 0, (((one,), ()), ((one,), (one, other))), ())
    ((a,), ()), ((b,), (c, d)) = sample_keys(swapped, 0)
    assert {a, b, c} == {first, third, fourth} and d == second


def test_runs_of_rows_and_of_shards() -> None:
    assert runs_of_rows([7, 8], [3, 5], 5) == ((7, 0, 3), (0, 0, 2), (8, 0, 5))
    assert runs_of_rows([7, 8], [3, 5], 0) == ((7, 0, 3), (8, 0, 5))
    assert runs_of_rows([], [], 9) == (FILLER,)
    assert runs_of_shard([7, 8], ((1, 2, 3), (0, 0, 4), (2, 0, 1))) == ((8, 2, 3), (7, 0, 4), (0, 0, 1))
