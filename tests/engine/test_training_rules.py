"""Parts, patterns and groups that are trained differently: every layout equals the plain model trained so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dhp.core.axes import Degrees
from dhp.core.parameters import ALL, GroupRule, Selector, TrainingRules
from dhp.engine.stage_settings import StageSettings
from tests.engine.test_parity import assert_exact, assert_exact_in_single_precision
from tests.helpers.batches import awkward_steps
from tests.helpers.layouts import Case, Fault, InspectedText, compare, compare_rounding
from tests.helpers.rows import on_demand

ONE = Degrees()
GROUPS = (
    GroupRule("late", (Selector("visual.merger"), Selector("layers.[12]")), 5e-3, None, 2),
    GroupRule("light", (Selector("*norm*"), Selector("*bias")), None, 0.0),
)
FROZEN = ("blocks.[01]", "layers.[02]", "*norm.weight", "*up_proj*")
CASES = [
    Case(Degrees(data=2), Degrees(tensor=2), 2, packing=True, groups=GROUPS),
    on_demand(
        Case(Degrees(ulysses=2), Degrees(data=2), 2, zero_stage=1, text_zero_stage=2, groups=GROUPS, dtype="float32")
    ),
    on_demand(
        Case(Degrees(data=2), Degrees(data=2), 2, zero_stage=3, text_zero_stage=3, groups=GROUPS, dtype="float32")
    ),
    on_demand(
        Case(Degrees(data=2), Degrees(data=2, tensor=2), 2, zero_stage=2, text_zero_stage=3, fsdp=True, groups=GROUPS)
    ),
    on_demand(Case(ONE, Degrees(tensor=2), 2, frozen=FROZEN, groups=GROUPS, checkpointing=True)),
    on_demand(
        Case(Degrees(data=2), Degrees(data=2), 2, zero_stage=1, text_zero_stage=1, frozen=FROZEN, dtype="float32")
    ),
    on_demand(
        Case(Degrees(data=2), Degrees(data=2), 2, zero_stage=3, text_zero_stage=3, frozen=FROZEN, dtype="float32")
    ),
    on_demand(
        Case(
            Degrees(data=2),
            Degrees(data=2),
            2,
            zero_stage=3,
            text_zero_stage=2,
            fsdp=True,
            frozen=FROZEN,
            groups=GROUPS,
        )
    ),
]
# A replica without a picture goes back as far as one with some, for the weights that both gather on the way.
GATHERED = Case(ONE, Degrees(data=2), 2, text_zero_stage=3, fsdp=True, frozen=("embed_tokens", "layers.[01]"))
# So does one that shares a sequence with others, for what they exchange on the way.
EXCHANGED = [
    Case(ONE, Degrees(ring=2), 2, frozen=("text",)),
    on_demand(Case(ONE, Degrees(ulysses=4), 2, trainable=("projector", "layers.3"), packing=True)),
    on_demand(Case(ONE, Degrees(ring=2), 2, frozen=("vision", "projector", "layers.0"), checkpointing=True)),
]
# Of the first stage nothing is trained; of the last, and of both, the weight that is embedding and head.
STAGED = [
    Case(ONE, ONE, 2, stages=2, schedule="1f1b", frozen=("vision", "projector", "embed_tokens", "layers.[01]")),
    Case(ONE, Degrees(tensor=2), 2, stages=2, schedule="1f1b", trainable=("projector", "embed_tokens"), packing=True),
    on_demand(Case(ONE, Degrees(data=2), 2, stages=2, trainable=("layers.1", "blocks"), text_zero_stage=3, fsdp=True)),
    Case(ONE, Degrees(data=2), 2, stages=2, chunks=2, schedule="interleaved", frozen=("embed_tokens",), groups=GROUPS),
]


@pytest.mark.parametrize("case", [*CASES, GATHERED, *EXCHANGED], ids=str)
def test_equals_the_plain_model_trained_so(case: Case, four_layers_model: str) -> None:
    exact = assert_exact if case.dtype == "float64" else assert_exact_in_single_precision
    exact(compare(four_layers_model, case, awkward_steps()))


# A rule named as its part: the projector, in the same stage, has the rate of all.
TOWER = (GroupRule("vision", (Selector("vision", ("model.visual",), ("model.visual.merger",)),), 1e-6, None, 2),)
NAMED_AS_PART = [
    Case(ONE, ONE, 2, groups=TOWER),
    Case(ONE, Degrees(tensor=2), 2, groups=TOWER, optimizer="muon"),
    Case(Degrees(data=2), Degrees(data=2), 2, zero_stage=3, text_zero_stage=3, fsdp=True, groups=TOWER),
    Case(Degrees(data=2), Degrees(data=2), 2, zero_stage=1, text_zero_stage=1, groups=TOWER, dtype="float32"),
]


@pytest.mark.parametrize("case", NAMED_AS_PART, ids=str)
def test_a_group_named_as_its_part_has_its_own_rate(case: Case, four_layers_model: str) -> None:
    exact = assert_exact if case.dtype == "float64" else assert_exact_in_single_precision
    exact(compare(four_layers_model, case, awkward_steps()))


@pytest.mark.parametrize("case", STAGED, ids=str)
def test_stages_of_which_some_train_nothing_and_a_weight_of_two(case: Case, tied_model: str) -> None:
    assert_exact(compare(tied_model, case, awkward_steps()))


@pytest.mark.grid
def test_groups_in_bfloat16_under_zero(four_layers_model: str) -> None:
    case = Case(Degrees(data=2), Degrees(data=2), 2, "bfloat16", 1, text_zero_stage=1, packing=True, groups=GROUPS)
    ratios = compare_rounding(four_layers_model, case, awkward_steps())
    assert max(ratios.loss, ratios.gradient, ratios.update) < 2.5, ratios


class GroupsForgotten(InspectedText):
    """Every parameter of the text part is in one group."""

    def __init__(self, settings: StageSettings):
        super().__init__(replace(settings, rules=replace(settings.rules, groups=())))


class FreezesNothing(InspectedText):
    """Every parameter of the text part is trained."""

    def __init__(self, settings: StageSettings):
        super().__init__(replace(settings, rules=ALL))


class DecayForgotten(InspectedText):
    """Groups have their learning rate, and the decay of all."""

    def __init__(self, settings: StageSettings):
        groups = tuple(replace(rule, weight_decay=None) for rule in settings.rules.groups)
        super().__init__(replace(settings, rules=TrainingRules(groups=groups)))


@pytest.mark.parametrize("fault", [GroupsForgotten, DecayForgotten], ids=lambda kind: kind.__name__)
def test_a_group_that_is_ignored_shows(fault: type[InspectedText], four_layers_model: str) -> None:
    found = compare(four_layers_model, Case(ONE, ONE, 2, groups=GROUPS), awkward_steps(), Fault(text=fault))
    assert found.update > 1e-4, found


def test_what_is_trained_though_frozen_shows(four_layers_model: str) -> None:
    with pytest.raises(AssertionError, match=r"layers\.0\..* got a gradient that the plain model does not have"):
        compare(four_layers_model, Case(ONE, ONE, 2, frozen=("layers.0",)), awkward_steps(), Fault(text=FreezesNothing))
