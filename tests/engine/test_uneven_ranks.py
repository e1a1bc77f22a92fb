"""Ranks whose data differ on purpose make the same collectives: a sequence of them is a function of the plan alone.

Every case runs with its ranks' calls compared before they begin (`dhp.core.collectives`), beside the plain model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dhp.batch import shard
from dhp.batch.encoder_shards import Encoder
from dhp.core.axes import Degrees
from dhp.core.parameters import AdapterSettings
from dhp.data.sample.sample import Sample
from dhp.models import lora as adapters
from tests.engine.test_declared_families import PICTURES_EVERYWHERE, Made, run
from tests.engine.test_parity import assert_exact
from tests.helpers import ranks
from tests.helpers.batches import mixed_step, step_without_image
from tests.helpers.families import Maker
from tests.helpers.layouts import FIRST_OUT, Case, _slotted, compare, make_sharder
from tests.helpers.rows import slow, slow_but
from tests.helpers.tiny_families import FAMILIES

ONE, TWO = Degrees(), Degrees(data=2)
FSDP = Case(TWO, TWO, 2, zero_stage=3, text_zero_stage=3, fsdp=True, packing=True, checked=True)
DEEPSPEED = Case(TWO, TWO, 2, "float32", zero_stage=3, text_zero_stage=3, packing=True, checked=True)


def uneven_steps(model: str, everywhere: bool = False) -> list[list[Sample]]:
    """Four samples a step, of which a rank takes one of each micro-batch: pictures of several shapes beside none, five
    beside one, a long row beside a short one."""
    make, none = Maker(model).sample, [3] if everywhere else []
    return [
        [make([0, 1, 2], 4, 1), make(none, 1, 2), make(none, 6, 3), make([4], 2, 4)],
        [make(none, 3, 5), make([0, 1, 2, 3, 4], 2, 6), make([2], 1, 7), make(none, 7, 8)],
    ]


def test_the_steps_are_uneven(made: dict[str, Made]) -> None:  # noqa: F811
    """Or this file would hold nothing: left alone, ranks would call a tower of whole pictures unequally often."""
    model = made["llava_next"].folder
    step = uneven_steps(model)[1]
    calls = lambda case: [
        [len(one.calls) for one in of_ranks]
        for of_ranks in make_sharder(model, case).shard(_slotted(0, case, step)).work["vision"]
    ]
    lonely = Case(TWO, TWO, 2, packing=True)
    assert calls(lonely) != calls(FSDP)
    assert any(len(set(of_ranks)) > 1 for of_ranks in calls(lonely))
    assert all(len(set(of_ranks)) == 1 for of_ranks in calls(FSDP))


ALWAYS = [
    ("llava_next", FSDP),  # a tower called once for each shape of pictures
    ("llava_next", DEEPSPEED),
    # Experts that only tokens of pictures visit, so that a rank may have none for them.
    ("ernie4_5_vl_moe", FSDP),
    ("ernie4_5_vl_moe", DEEPSPEED),
    ("ernie4_5_vl_moe", Case(ONE, Degrees(ring=2), 2, packing=True, checked=True)),
    ("ernie4_5_vl_moe", Case(ONE, Degrees(data=2, expert=2), 2, packing=True, checked=True)),
    ("ernie4_5_vl_moe", Case(ONE, Degrees(data=2, tensor=2), 2, packing=True, checked=True)),
]


@pytest.mark.parametrize(("name", "case"), slow_but(ALWAYS, ALWAYS[0]), ids=str)
def test_ranks_call_alike(name: str, case: Case, made: dict[str, Made]) -> None:  # noqa: F811
    check(made[name], case, uneven_steps(made[name].folder))


@pytest.mark.families
@pytest.mark.parametrize("case", [FSDP, DEEPSPEED], ids=["fsdp", "deepspeed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_of_every_family(name: str, case: Case, made: dict[str, Made]) -> None:  # noqa: F811
    check(made[name], case, uneven_steps(made[name].folder, name in PICTURES_EVERYWHERE))


def check(model: Made, case: Case, steps: list[list[Sample]]) -> None:
    if case.dtype == "float64":
        assert_exact(run(Made(model.folder, steps), case))
        return
    # Gradients that are small beside the whole one differ by 1e-3 in float32, on one plain rank as well, and of a delta
    # net all do by 1e-4.
    errors = compare(model.folder, case, steps)
    assert errors.loss < 1e-5 and errors.norm < 1e-3, errors


LORA = (("vision", AdapterSettings(2, 4.0)), ("text", AdapterSettings(2, 4.0)))
BEGINS_FROZEN = [
    Case(ONE, TWO, 2, text_zero_stage=2, fsdp=True, frozen=("embed_tokens",), packing=True, checked=True),
    slow(Case(TWO, TWO, 2, text_zero_stage=2, zero_stage=2, fsdp=True, lora=LORA, checked=True)),
]


@pytest.mark.parametrize("case", BEGINS_FROZEN, ids=str)
def test_gradients_are_reduced_alike_where_one_replica_sees_no_picture(
    case: Case, four_layers_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the decoder embeds needs a gradient on one replica only, for the tower's sake."""
    monkeypatch.setattr(adapters, "FIRST_OUT", FIRST_OUT)
    steps = [mixed_step(), step_without_image()]
    assert_exact(compare(four_layers_model, case, steps))


def test_without_even_calls_it_is_seen_at_once(made: dict[str, Made], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The net itself: with the calls left as each rank's pictures ask for, ranks disagree and say so."""
    own = Encoder.inputs

    def uneven(self: Encoder, dealt: Any) -> Any:
        object.__setattr__(self.split, "even_calls", False)
        return own(self, dealt)

    monkeypatch.setattr(Encoder, "inputs", uneven)
    monkeypatch.setattr(ranks, "AGREE_S", 5)
    with pytest.raises(RuntimeError, match="different collectives|did not make that call"):
        check(made["llava_next"], FSDP, uneven_steps(made["llava_next"].folder))


ROWS = replace(DEEPSPEED, micro_batches=1)  # two samples a row


def rows_of_unlike_runs(model: str) -> list[list[Sample]]:
    """A row of two samples of one length, which a delta net takes in one call, beside one of two lengths."""
    make = Maker(model).sample
    return [[make([], 1, 1), make([], 2, 2), make([0], 2, 3), make([1, 2], 2, 4)]] * 2


@pytest.mark.slow
def test_layers_that_take_each_sample_by_itself_are_called_alike(made: dict[str, Made]) -> None:  # noqa: F811
    model = made["qwen3_5"]
    steps = rows_of_unlike_runs(model.folder)
    rows = make_sharder(model.folder, ROWS).shard(_slotted(0, ROWS, steps[0])).work["text"][0]
    assert [len(set(row.lengths)) for row in rows] == [1, 2] and [row.segment_calls for row in rows] == [2, 2]
    check(model, ROWS, steps)


def test_without_even_calls_of_such_layers_it_is_seen(
    made: dict[str, Made],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made["qwen3_5"]
    monkeypatch.setattr(shard, "_count_runs", lambda lengths: 0)
    monkeypatch.setattr(ranks, "AGREE_S", 5)
    with pytest.raises(RuntimeError, match="different collectives|did not make that call"):
        check(model, ROWS, rows_of_unlike_runs(model.folder))
