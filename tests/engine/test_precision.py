"""Rounding, frozen parts and groups as one process has."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dhp.core.axes import Degrees
from dhp.core.parameters import ALL, GroupRule, Selector, TrainingRules
from dhp.engine.stage_settings import StageSettings
from dhp.models.empty import stored_dtype
from tests.helpers import layouts
from tests.helpers.alike import assert_exact, assert_exact_in_single_precision
from tests.helpers.batches import awkward_steps, mixed_step
from tests.helpers.layouts import (
    Case,
    Fault,
    InspectedText,
    InspectedVision,
    Running,
    compare,
    compare_rounding,
    graph_of,
    make_reader,
    settings,
)
from tests.helpers.ranks import LocalGroup
from tests.helpers.rows import on_demand, slow, slow_but

ONE = Degrees()
CUT = Case(Degrees(data=2), Degrees(data=2, tensor=2), 4, "bfloat16", 3, text_zero_stage=3, packing=True, fsdp=True)
CASES = [
    Case(ONE, ONE, dtype="bfloat16"),
    Case(ONE, Degrees(tensor=2), dtype="bfloat16", state_bytes=12),
    *(on_demand(replace(CUT, state_bytes=nbytes)) for nbytes in (16, 12, 10)),
    *(on_demand(Case(ONE, Degrees(data=2), dtype="bfloat16", state_bytes=nbytes)) for nbytes in (16, 10)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rounding_is_that_of_one_process(case: Case, made_model: str) -> None:
    ratios = compare_rounding(made_model, case, awkward_steps())
    assert ratios.loss < 2.5, ratios
    assert ratios.gradient < 2.5, ratios
    assert ratios.update < 2.5, ratios


@pytest.mark.parametrize("case", [CASES[0], slow(CUT)], ids=str)
def test_weights_stored_in_16_bits_are_read_as_they_are(case: Case, made_model: str, tmp_path: Path) -> None:
    """And widened where they are cut: every rank's masters begin as the same numbers as those of one process."""
    folder = Path(shutil.copytree(made_model, tmp_path / "rounded"))
    for file in folder.glob("*.safetensors"):
        save_file({n: w.bfloat16() for n, w in load_file(file).items()}, file, {"format": "pt"})
    assert stored_dtype(str(folder)) is torch.bfloat16
    ratios = compare_rounding(str(folder), case, awkward_steps())
    assert max(ratios.loss, ratios.gradient, ratios.update) < 2.5, ratios


class Watched:
    """What a rank's module and optimizer hold."""

    def formats(self: Any) -> dict[str, set[torch.dtype]]:
        return {
            "parameters": {p.dtype for p in self.model.parameters()},
            "frequencies": {b.dtype for n, b in self.model.named_buffers() if "inv_freq" in n},
            "masters": {m.dtype for m in self.optimizer._masters},
            "moments": {s["exp_avg"].dtype for s in self.optimizer.optimizer.state.values()},
        }

    def frequencies(self: Any) -> dict[str, Tensor]:
        return {n: b.clone() for n, b in self.model.named_buffers() if "inv_freq" in n}


class WatchedVision(Watched, InspectedVision):
    pass


class WatchedText(Watched, InspectedText):
    pass


@pytest.mark.parametrize(("part", "trainer"), [("vision", WatchedVision), ("text", WatchedText)])
def test_weights_are_rounded_and_rotary_frequencies_are_not(part: str, trainer: type, made_model: str) -> None:
    found = {}
    for dtype in ("float32", "bfloat16"):
        case = Case(ONE, ONE, dtype=dtype)
        graph = graph_of(made_model, case)
        with LocalGroup(trainer, 1, settings(graph.stage(part), graph, made_model, case)) as group:
            (formats,), (frequencies,) = group.execute_all("formats"), group.execute_all("frequencies")
            assert group.execute_all("rounded") == [True]
        assert formats["parameters"] == {getattr(torch, dtype)}
        assert formats["frequencies"] == formats["masters"] == {torch.float32}
        found[dtype] = frequencies
    assert found["float32"]
    assert all(torch.equal(found["bfloat16"][name], exact) for name, exact in found["float32"].items())


def test_weights_move_at_a_rate_that_bfloat16_alone_would_lose(made_model: str, monkeypatch: Any) -> None:
    """At 5e-5 an update is below half of bfloat16's spacing for most weights: without masters they stand still."""
    slow = replace(layouts.UPDATE, learning_rate=5e-5, lr_scheduler_type="constant", weight_decay=0.0)
    monkeypatch.setattr(layouts, "UPDATE", slow)
    case = Case(Degrees(ulysses=2), Degrees(tensor=2), dtype="bfloat16")
    steps = [mixed_step()] * 3
    trained = layouts.train(made_model, case, steps)
    start = layouts.Oracle(made_model, torch.float32, slow).weights()
    still = moved = 0
    for of_rank in (rank for part in trained.weights for rank in part):
        for name, weight in of_rank.items():
            # Tokens that no sample holds have no gradient, and so no update.
            seen = trained.gradients[-1]
            touched = next(g[name] for g in seen if name in g) != 0
            still += int(((weight == start[name]) & touched).sum())
            moved += int(((weight != start[name]) & touched).sum())
    assert moved > 100_000
    assert still < 0.001 * moved
    assert trained.losses[-1] < trained.losses[0]


GROUPS = (
    GroupRule("late", (Selector("visual.merger"), Selector("layers.[12]")), 5e-3, None, 2),
    GroupRule("light", (Selector("*norm*"), Selector("*bias")), None, 0.0),
)
FROZEN = ("blocks.[01]", "layers.[02]", "*norm.weight", "*up_proj*")
RULE_CASES = [Case(Degrees(data=2), Degrees(tensor=2), 2, packing=True, groups=GROUPS)]
# A replica without a picture goes back as far as one with some, for the weights that both gather on the way.
GATHERED = Case(ONE, Degrees(data=2), 2, text_zero_stage=3, fsdp=True, frozen=("embed_tokens", "layers.[01]"))
# So does one that shares a sequence with others, for what they exchange on the way.
EXCHANGED = [Case(ONE, Degrees(ring=2), 2, frozen=("text",))]
# LLaVA's alignment and finetuning: weights of a part that trains nothing are cut alone, and gathered for each layer.
TWO = Degrees(data=2)
CUT_FROZEN = [
    Case(ONE, TWO, 2, text_zero_stage=3, fsdp=True, frozen=("text",), packing=True),
    Case(TWO, Degrees(data=2, tensor=2), 1, zero_stage=3, text_zero_stage=3, fsdp=True, frozen=("vision", "text")),
    Case(TWO, TWO, 2, zero_stage=3, text_zero_stage=2, fsdp=True, frozen=("vision", "projector"), checkpointing=True),
    Case(TWO, Degrees(ring=2), 2, "bfloat16", text_zero_stage=3, fsdp=True, frozen=("text",), packing=True),
]
# Of the first stage nothing is trained; of the last, and of both, the weight that is embedding and head.
STAGED = [
    Case(ONE, ONE, 2, stages=2, schedule="1f1b", frozen=("vision", "projector", "embed_tokens", "layers.[01]")),
    Case(ONE, Degrees(tensor=2), 2, stages=2, schedule="1f1b", trainable=("projector", "embed_tokens"), packing=True),
    Case(ONE, Degrees(data=2), 2, stages=2, chunks=2, schedule="interleaved", frozen=("embed_tokens",), groups=GROUPS),
]


@pytest.mark.parametrize("case", [*RULE_CASES, GATHERED, *EXCHANGED], ids=str)
def test_equals_the_plain_model_trained_so(case: Case, four_layers_model: str) -> None:
    exact = assert_exact if case.dtype == "float64" else assert_exact_in_single_precision
    exact(compare(four_layers_model, case, awkward_steps()))


@pytest.mark.parametrize("case", slow_but(CUT_FROZEN[:3], CUT_FROZEN[0], CUT_FROZEN[2]), ids=str)
def test_a_part_that_trains_nothing_is_cut(case: Case, four_layers_model: str) -> None:
    assert_exact(compare(four_layers_model, case, awkward_steps()))


def test_a_rank_keeps_its_share_of_weights_that_are_not_trained(four_layers_model: str) -> None:
    case, samples = CUT_FROZEN[3], awkward_steps()[0]
    with Running(four_layers_model, case, Fault(InspectedVision, KeepsItsShare)) as running:
        running.step(make_reader(four_layers_model, case, [samples]).step(0))
        held = running.groups["text"].execute_all("held")
    whole = sum(sizes[1] for sizes in held) // len(held)
    assert all(0.5 * whole <= own < 0.51 * whole for own, _ in held) and whole > 100_000


class KeepsItsShare(InspectedText):
    """Counts values of its weights."""

    def held(self) -> tuple[int, int]:
        """Here, and in all."""
        weights = list(self.model.parameters())
        return sum(one.to_local().numel() for one in weights), sum(one.numel() for one in weights)


# A rule named as its part: the projector, in the same stage, has the rate of all.
TOWER = (GroupRule("vision", (Selector("vision", ("model.visual",), ("model.visual.merger",)),), 1e-6, None, 2),)
NAMED_AS_PART = [
    Case(ONE, ONE, 2, groups=TOWER),
    Case(ONE, Degrees(tensor=2), 2, groups=TOWER, optimizer="muon"),
    Case(Degrees(data=2), Degrees(data=2), 2, zero_stage=3, text_zero_stage=3, fsdp=True, groups=TOWER),
    Case(Degrees(data=2), Degrees(data=2), 2, zero_stage=1, text_zero_stage=1, groups=TOWER, dtype="float32"),
]


@pytest.mark.parametrize("case", slow_but(NAMED_AS_PART, NAMED_AS_PART[0], NAMED_AS_PART[2]), ids=str)
def test_a_group_named_as_its_part_has_its_own_rate(case: Case, four_layers_model: str) -> None:
    exact = assert_exact if case.dtype == "float64" else assert_exact_in_single_precision
    exact(compare(four_layers_model, case, awkward_steps()))


@pytest.mark.parametrize("case", slow_but(STAGED, STAGED[0], STAGED[1]), ids=str)
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
