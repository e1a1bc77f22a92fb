"""A decoder whose ranks share a sequence: equal to the plain model that sees each sample whole and alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, Bundle, StepData, TextInput
from dhp.data.sample.sample import Sample
from tests.helpers.alike import assert_exact, assert_exact_in_single_precision
from tests.helpers.layouts import (
    Case,
    Errors,
    Fault,
    InspectedText,
    InspectedVision,
    compare,
    compare_rounding,
    make_reader,
)
from tests.helpers.rows import slow, slow_but
from tests.helpers.tiny import IMAGE_TOKEN, make_sample

ONE = Degrees()


def _make(grids: list[tuple[int, int, int]], tokens: int, targets: int, seed: int, seconds: tuple = ()) -> Sample:
    return make_sample(grids, tokens, targets, seed, IMAGE_TOKEN, seconds=seconds)


def _of_one_token(seed: int) -> Sample:
    made = _make([], 1, 0, seed)
    return replace(
        made, input_ids=made.input_ids[:1], labels=made.labels[:1], mm_token_type_ids=made.mm_token_type_ids[:1]
    )


@cache
def steps() -> list[list[Sample]]:
    """Pictures and a video that lie across the ranks' borders beside samples of one and three tokens; then text alone,
    of which some ranks have none; then nothing to learn; then one long sample, all of whose text but its end is a
    picture."""
    return [
        [
            _make([(1, 12, 14)], 15, 7, 1),
            _make([(2, 4, 6), (1, 8, 6)], 21, 20, 2, (0.5, None)),
            _of_one_token(3),
            _make([], 1, 2, 4),
        ],
        [_of_one_token(5), _make([], 38, 36, 6), _of_one_token(7), _of_one_token(8)],
        [_make([(1, 4, 4)], 5, 0, 31), _make([], 6, 0, 32), _make([], 3, 0, 33), _of_one_token(9)],
        [_make([(1, 20, 18)], 3, 3, 10), _make([], 2, 1, 11), _make([], 4, 3, 12), _of_one_token(13)],
    ]


SHARED = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (3, 1)]  # Ulysses × ring
MATRIX = [
    Case(vision, Degrees(ulysses=ulysses, ring=ring, tensor=tensor), micro, stages=stages, packing=packing)
    for (ulysses, ring), tensor, stages, (vision, micro, packing) in product(
        SHARED, (1, 2), (1, 2), ((Degrees(ulysses=2), 2, True), (Degrees(data=2), 1, False))
    )
]


@pytest.mark.grid
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_every_mesh_equals_the_plain_model(case: Case, attending_model: str) -> None:
    assert_exact(compare(attending_model, case, steps()))


SOME = [
    Case(Degrees(ulysses=2), Degrees(ulysses=3), 1, packing=True),
    slow(Case(Degrees(data=2), Degrees(ring=2, ulysses=2), 2)),
    slow(Case(ONE, Degrees(ring=4), 2, recompute="offload")),
]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_equals_the_plain_model(case: Case, attending_model: str) -> None:
    assert_exact(compare(attending_model, case, steps()))


@cache
def long_and_short() -> list[list[Sample]]:
    """A long sample and short ones; then two that a ring place can hold and short ones; then a long one and tokens."""
    return [
        [
            _make([(1, 28, 30)], 40, 7, 41),
            *(_make([(1, 4, 4)], 8 + seed % 3, 5, seed) for seed in range(2, 8)),
            _make([(1, 12, 14)], 15, 7, 8),
        ],
        [
            *(_make([(1, 12, 14)], 15, 7, seed) for seed in (49, 50)),
            *(_make([(1, 4, 4)] if seed % 2 else [], 3, 2, seed) for seed in range(11, 17)),
        ],
        [_make([(1, 8, 16)], 15, 7, 1), *(_of_one_token(seed) for seed in range(7))],
    ]


GROUPED = [
    Case(Degrees(ulysses=2), Degrees(ring=2, ulysses=2), 1, sequence_groups="auto"),
    Case(Degrees(data=2), Degrees(ring=3), 2, sequence_groups="auto"),
]


@pytest.mark.parametrize("case", slow_but(GROUPED, GROUPED[1]), ids=str)
def test_short_samples_on_fewer_ranks_equal_the_plain_model(case: Case, attending_model: str) -> None:
    assert_exact(compare(attending_model, case, long_and_short()))


def test_what_is_divided_though_it_is_short_is_told(attending_model: str) -> None:
    case = GROUPED[0]
    of_groups, of_one = (
        [
            make_reader(attending_model, replace(case, sequence_groups=groups), long_and_short()).step(k)
            for k in range(3)
        ]
        for groups in ("auto", "one")
    )
    short = sum(len(sample.input_ids) for sample in long_and_short()[0][1:])
    assert of_one[0].info.sp_ratio == short / of_one[0].info.tokens
    assert [step.info.sp_ratio for step in of_groups] == [0.0, 0.0, 0.0]
    assert _whole(of_groups[0]) == [1, 2, 3, 4, 5, 6, 7]  # and the long one over all four ranks
    ranks_of = [
        {r for r, shard in enumerate(_work(of_groups[1]).shards) for s, *_ in shard if s == one} for one in (0, 1)
    ]
    assert sorted(map(sorted, ranks_of)) == [[0, 1], [2, 3]]
    assert _whole(of_groups[1]) == [2, 3, 4, 5, 6, 7]


def _whole(step: StepData) -> list[int]:
    """Samples that one rank has."""
    work = _work(step)
    lengths = work.lengths or ()
    held = (s for shard in work.shards for s, _, count in shard if count == lengths[s])
    return sorted(s for s in held if s < step.info.samples)  # those behind are dummies


def _work(step: StepData) -> TextInput:
    return step.work["text"][0][0]


CUT_STATES = [Case(Degrees(ulysses=2), Degrees(ring=2), 1, "float32", zero_stage=1, text_zero_stage=3)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CUT_STATES, ids=str)
def test_states_that_are_cut_too(case: Case, few_keys_model: str) -> None:
    # Of the other model, whose scores are large, one plain process in float32 is as far from another's sums.
    assert_exact_in_single_precision(compare(few_keys_model, case, steps()))


@pytest.mark.parametrize("text", [Degrees(ring=2, ulysses=2)], ids=str)
@pytest.mark.slow
def test_in_16_bits_it_rounds_no_more_than_one_process(text: Degrees, attending_model: str) -> None:
    ratios = compare_rounding(attending_model, Case(Degrees(ulysses=2), text, 2, "bfloat16"), steps())
    assert max(ratios.loss, ratios.gradient, ratios.update) < 2.5, ratios


class ShiftsAtBorders(InspectedText):
    """Each rank shifts its own labels: the first token of another rank's share is what nobody predicts."""

    def forward_step(self, micro_batch: int, chunk: int, work: TextInput, *received: Bundle) -> tuple[Bundle, ...]:
        targets = work.tensors["targets"].clone()
        row, spans = 0, work.shards[torch.distributed.get_rank()]
        for _, _, count in spans:
            row += count
            targets[..., row - 1] = IGNORED
        work = replace(work, tensors=work.tensors | {"targets": targets})
        return super().forward_step(micro_batch, chunk, work, *received)


class LocalPositions(InspectedText):
    """Positions counted from the first token that a rank has."""

    def forward_step(self, micro_batch: int, chunk: int, work: TextInput, *received: Bundle) -> tuple[Bundle, ...]:
        local = torch.arange(work.tensors["input_ids"].shape[-1]).expand_as(work.tensors["position_ids"])
        work = replace(work, tensors=work.tensors | {"position_ids": local.contiguous()})
        return super().forward_step(micro_batch, chunk, work, *received)


class LocalAttention(InspectedText):
    """A token sees what its own rank has."""

    def forward_step(self, micro_batch: int, chunk: int, work: TextInput, *received: Bundle) -> tuple[Bundle, ...]:
        spans = [span for shard in work.shards for span in shard]
        numbers = iter(range(len(spans)))
        shards = tuple(tuple((next(numbers), 0, count) for _, _, count in shard) for shard in work.shards)
        lengths = tuple(count for _, _, count in spans)
        work = replace(work, lengths=lengths, shards=shards, samples=lengths)
        return super().forward_step(micro_batch, chunk, work, *received)


class LosesGradientsAtBorders(InspectedVision):
    """The gradient of a picture's rows comes from the first rank that has some."""

    def backward_step(self, micro_batch: int, chunk: int, last: bool, *received: Bundle) -> tuple[Bundle, ...]:
        kept = [Bundle({n: g * (at == 0) for n, g in b.tensors.items()}) for at, b in enumerate(received)]
        return super().backward_step(micro_batch, chunk, last, *kept)


class RowsInTowerOrder(InspectedVision):
    """Rows go to the decoder's ranks as they leave the tower."""

    def forward_step(self, micro_batch: int, chunk: int, work: Any, *received: Bundle) -> tuple[Bundle, ...]:
        return super().forward_step(micro_batch, chunk, replace(work, order=None), *received)


class CountsTwice(InspectedText):
    """Gradients summed over the ranks of a sequence once more."""

    def backward_step(self, *arguments: Any) -> tuple[Bundle, ...]:
        result = super().backward_step(*arguments)
        if arguments[2]:
            self.optimizer._take_sums()
            for master in self.optimizer._masters:
                master.grad *= self.spec.degrees.sequence
        return result


def divided_by_own_targets(data: StepData) -> StepData:
    """Each rank's share divided by its own number of targets."""
    count = lambda work: int((work.tensors["targets"] != IGNORED).sum())
    text = tuple(tuple(replace(work, total_weight=count(work)) for work in row) for row in data.work["text"])
    return replace(data, work={**data.work, "text": text})


CASE = Case(ONE, Degrees(ring=2), 1)
FAULTS: list[tuple[str, Fault, Callable[[Errors], bool]]] = [
    ("labels shifted by shard", Fault(text=ShiftsAtBorders), lambda e: e.loss > 1e-3 and e.gradient > 0.05),
    ("positions local to a shard", Fault(text=LocalPositions), lambda e: e.loss > 1e-4 and e.gradient > 0.05),
    ("attention local to a shard", Fault(text=LocalAttention), lambda e: e.loss > 1e-4 and e.gradient > 0.05),
    ("a picture's gradient lost", Fault(LosesGradientsAtBorders), lambda e: e.loss < 1e-9 < 0.05 < e.gradient),
    ("rows in the tower's order", Fault(RowsInTowerOrder), lambda e: e.loss > 1e-6 and e.gradient > 0.01),
    ("a sum counted twice", Fault(text=CountsTwice), lambda e: e.loss < 1e-9 < 0.9 < e.gradient < 1.1),
    ("own targets", Fault(edit=divided_by_own_targets), lambda e: e.loss > 0.1 and e.gradient > 0.1),
]


@pytest.mark.parametrize(("fault", "seen"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_planted_mistake_is_seen(fault: Fault, seen: Callable[[Errors], bool], attending_model: str) -> None:
    errors = compare(attending_model, CASE, [steps()[0]], fault)
    assert seen(errors), errors


def test_no_rank_gets_the_whole_row(attending_model: str) -> None:
    from tests.helpers.layouts import _slotted, make_sharder

    case = Case(Degrees(ulysses=2), Degrees(ring=2, ulysses=2), 1)
    data = make_sharder(attending_model, case).shard(_slotted(0, case, steps()[0]))
    total = sum(len(sample.input_ids) for sample in steps()[0])
    shares = [work.tensors["input_ids"].numel() for work in data.work["text"][0]]
    assert sum(shares) == total and max(shares) - min(shares) <= len(steps()[0])
    for work, share in zip(data.work["text"][0], shares, strict=True):
        assert {name: values.shape[-1] for name, values in work.tensors.items()} == dict.fromkeys(work.tensors, share)
    rows = [work.placements["vision"] for work in data.work["text"][0] if work.placements]
    assert sum(map(len, rows)) == sum(int(np.count_nonzero(s.mm_token_type_ids)) for s in steps()[0])
    assert sum(sum(work.rows) for work in data.work["vision"][0]) == sum(map(len, rows))
