"""Layouts equal the plain model: pairs, grid, pipelines."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from dhp.core.axes import Degrees
from dhp.core.batch import Bundle, StepInfo
from dhp.data.sample.sample import Sample
from dhp.models import lora as adapters
from tests.engine.pair_rows import MORE, QUICK, ROWS
from tests.engine.pairs import FEATURES, Row, apart, features_of, pairs_of, shown_by, wanted_pairs
from tests.engine.test_families import equal_pictures as images_of_one_size
from tests.engine.test_families import steps as images_and_videos
from tests.helpers.alike import assert_exact, assert_exact_in_single_precision
from tests.helpers.batches import awkward_steps, mixed_step
from tests.helpers.layouts import (
    FIRST_OUT,
    Case,
    Errors,
    Fault,
    InspectedText,
    InspectedVision,
    compare,
    compare_rounding,
    train,
)
from tests.helpers.norms import exact_norms, use_exact_norms, use_exact_turns
from tests.helpers.rows import on_demand, slow
from tests.helpers.tiny import save_llava, save_llava_with_experts, save_model, save_qwen3_vl

ONE = Degrees()


EXACT = [
    Case(ONE, ONE),
    Case(Degrees(ulysses=4), ONE, micro_batches=1),
    Case(Degrees(ring=4), Degrees(data=2), micro_batches=1, packing=True),
    slow(Case(Degrees(ring=3), ONE, micro_batches=1)),
    Case(Degrees(data=2), ONE, micro_batches=3, schedule="vision_ahead", vision_batch=2),  # the last pass has one
    slow(Case(Degrees(tensor=4), ONE, micro_batches=3)),
    slow(Case(Degrees(data=2, tensor=2), Degrees(data=3), 2, "float64", 2, packing=True, text_zero_stage=2, fsdp=True)),
]
SINGLE = [
    Case(ONE, ONE, dtype="float32"),
    slow(Case(Degrees(data=3), ONE, 3, dtype="float32", zero_stage=3)),
    Case(ONE, Degrees(data=3), 1, dtype="float32", text_zero_stage=3, packing=True),
]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_equals_plain_model_in_double_precision(case: Case, made_model: str) -> None:
    errors = compare(made_model, case, awkward_steps())
    assert_exact(errors)


@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_equals_plain_model_in_single_precision(case: Case, made_model: str) -> None:
    assert_exact_in_single_precision(compare(made_model, case, awkward_steps()))


@pytest.mark.grid
def test_autotp_of_a_head_that_is_the_embedding(few_keys_model: str) -> None:
    assert_exact(compare(few_keys_model, Case(ONE, Degrees(tensor=2), autotp=True), awkward_steps()))


@pytest.mark.grid
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_of_a_head_that_is_the_embedding(stage: int, few_keys_model: str) -> None:
    case = Case(ONE, Degrees(data=2), dtype="float32", text_zero_stage=stage, packing=stage == 3)
    assert_exact_in_single_precision(compare(few_keys_model, case, awkward_steps()))


REPEATED = [
    Case(Degrees(data=2), Degrees(tensor=2), dtype="float32", zero_stage=1),
    slow(Case(Degrees(data=2), Degrees(data=2), dtype="float32", zero_stage=3, text_zero_stage=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_the_same_run_twice_is_the_same_to_the_bit_on_every_rank(case: Case, made_model: str) -> None:
    first, second = (train(made_model, case, awkward_steps()) for _ in range(2))
    assert first.losses == second.losses
    assert first.norms == second.norms
    for ours, theirs in zip(first.weights, second.weights, strict=True):
        for name, weight in ours[0].items():
            # Copies that drift apart between ranks would train a model that exists nowhere.
            assert all(torch.equal(weight, of_rank[name]) for of_rank in (*ours, *theirs)), name


SHARED_KEYS = [Case(ONE, Degrees(tensor=4)), slow(Case(ONE, Degrees(data=2, tensor=4), text_zero_stage=3, fsdp=True))]


@pytest.mark.parametrize("case", SHARED_KEYS, ids=str)
def test_ranks_that_share_a_key_value_head_equal_the_plain_model(case: Case, few_keys_model: str) -> None:
    errors = compare(few_keys_model, case, awkward_steps())
    assert_exact(errors)


FOUR = {"num_hidden_layers": 4}  # so that there is something to cut into stages of two chunks
MODELS: dict[str, tuple[Callable[[Path], Path], Callable[[], list[list[Sample]]]]] = {
    "windows": (lambda folder: save_model(folder, text=FOUR), awkward_steps),
    "tied": (lambda folder: save_model(folder, tied=True, text=FOUR | {"num_key_value_heads": 2}), awkward_steps),
    "whole images": (lambda folder: save_llava(folder, **FOUR), images_of_one_size),
    "deepstack": (save_qwen3_vl, images_and_videos),
    "experts": (lambda folder: save_llava_with_experts(folder, **FOUR), images_of_one_size),
}
_MADE: dict[str, tuple[str, Sequence[Sequence[Sample]]]] = {}


class _Exact:
    """On ranks, without the float32 of norms, routers and rotary positions of towers."""

    def __init__(self, settings: Any):
        use_exact_norms(setattr)
        use_exact_turns(setattr)
        super().__init__(settings)


class ExactVision(_Exact, InspectedVision):
    pass


class ExactText(_Exact, InspectedText):
    pass


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The row's model and its steps, once a session."""
    name = request.getfixturevalue("row").model
    if name not in _MADE:
        save, steps = MODELS[name]
        _MADE[name] = str(save(tmp_path_factory.mktemp("pairs") / "model")), steps()
    return _MADE[name]


@pytest.mark.parametrize("row", [*QUICK, *map(slow, MORE)], ids=str)
def test_equals_the_plain_model(row: Row, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "FIRST_OUT", FIRST_OUT)
    if row.case.dtype == "bfloat16":
        ratios = compare_rounding(made[0], row.case, made[1], together=row.model == "experts")
        assert max(ratios.loss, ratios.gradient, ratios.update) < 2.5, ratios
        return
    check = assert_exact if row.case.dtype == "float64" else assert_exact_in_single_precision
    use_exact_turns(monkeypatch.setattr)
    with exact_norms():
        check(compare(made[0], row.case, made[1], Fault(ExactVision, ExactText)))


def test_each_pair_of_features_is_in_a_row() -> None:
    met = set().union(*map(pairs_of, ROWS))
    missing = wanted_pairs() - met
    assert not missing, f"in no row: {sorted(' with '.join(sorted(pair)) for pair in missing)}"


def test_each_feature_is_in_a_quick_row() -> None:
    missing = set(FEATURES) - set().union(*map(shown_by, QUICK))
    assert not missing, f"in no quick row, which is what `make test` runs: {sorted(missing)}"


def test_no_row_has_a_pair_that_cannot_stand_together() -> None:
    for row in ROWS:
        wrong = [(pair, reason) for pair, reason in apart().items() if pair <= features_of(row)]
        assert not wrong, row
    assert set().union(*apart()) <= set(FEATURES)


def test_each_row_adds_a_pair() -> None:
    """Or it belongs behind `-m grid`."""
    for row in ROWS:
        others = set().union(*(pairs_of(other) for other in ROWS if other is not row))
        assert pairs_of(row) - others, f"{row} adds none"


Mode = tuple[Degrees, int]  # degrees, ZeRO stage

VISION: dict[str, Mode] = {
    "none": (Degrees(), 0),
    "data": (Degrees(data=2), 0),
    "sequence": (Degrees(ulysses=2), 0),
    "tensor": (Degrees(tensor=2), 0),
    **{f"deepspeed{stage}": (Degrees(data=2), stage) for stage in (1, 2, 3)},
}
TEXT: dict[str, Mode] = {
    "none": (Degrees(), 0),
    "data": (Degrees(data=2), 0),
    "tensor": (Degrees(tensor=2), 0),
    **{f"deepspeed{stage}": (Degrees(data=2), stage) for stage in (1, 2, 3)},
}


def make_case(vision: str, text: str, packing: bool, micro_batches: int) -> Case:
    """DeepSpeed refuses float64, so its modes run in float32."""
    (of_vision, stage), (of_text, text_stage) = VISION[vision], TEXT[text]
    dtype = "float32" if stage or text_stage else "float64"
    return Case(of_vision, of_text, micro_batches, dtype, zero_stage=stage, text_zero_stage=text_stage, packing=packing)


GRID = [
    pytest.param(vision, text, packing, micro, id=f"{vision}-{text}-{'packed' if packing else 'padded'}-{micro}")
    for vision, text, packing, micro in product(VISION, TEXT, (True, False), (1, 3))
]


@pytest.mark.grid
@pytest.mark.parametrize(("vision", "text", "packing", "micro_batches"), GRID)
def test_equals_plain_model(vision: str, text: str, packing: bool, micro_batches: int, made_model: str) -> None:
    case = make_case(vision, text, packing, micro_batches)
    errors = compare(made_model, case, awkward_steps())
    if case.dtype == "float64":
        assert_exact(errors)
    else:
        assert_exact_in_single_precision(errors)


FSDP = [
    pytest.param(data, tensor, stage, schedule, dtype, id=f"data{data}-tensor{tensor}-stage{stage}-{schedule}-{dtype}")
    for data, tensor, stage, schedule, dtype in product(
        (2, 3), (1, 2), (2, 3), ("sequential", "vision_ahead"), ("float64", "float32", "bfloat16")
    )
]


@pytest.mark.grid
@pytest.mark.parametrize(("data", "tensor", "stage", "schedule", "dtype"), FSDP)
def test_states_cut_by_torch(data: int, tensor: int, stage: int, schedule: str, dtype: str, made_model: str) -> None:
    degrees = Degrees(data=data, tensor=tensor)
    case = Case(degrees, degrees, 4 - data, dtype, stage, False, schedule, True, stage, fsdp=True)
    if dtype == "bfloat16":
        ratios = compare_rounding(made_model, case, awkward_steps())
        assert max(ratios.loss, ratios.gradient, ratios.update) < 2.5, ratios
    else:
        check = assert_exact if dtype == "float64" else assert_exact_in_single_precision
        check(compare(made_model, case, awkward_steps()))


CASES = [
    Case(Degrees(ring=2), ONE, 4, stages=2, chunks=2, schedule="interleaved", recompute="mlp:0-1,all:3"),
    slow(Case(ONE, ONE, 3, stages=4, schedule="1f1b")),
]
TIED = [Case(ONE, ONE, 2, stages=2, schedule="1f1b")]
TIED_SINGLE = [  # whose states DeepSpeed cuts, at other places in the first stage than in the last
    Case(ONE, Degrees(data=2), 2, "float32", stages=2, schedule="1f1b", text_zero_stage=1),
]  # fmt: skip
STAGED_SINGLE = [
    on_demand(Case(Degrees(ulysses=2), Degrees(tensor=2), 4, "float32", 1, stages=2, schedule="1f1b", packing=True)),
    on_demand(Case(ONE, Degrees(data=2), 2, "float32", stages=2, schedule="1f1b", text_zero_stage=1)),
    on_demand(Case(ONE, Degrees(data=2), 4, "float32", stages=2, chunks=2, schedule="interleaved", text_zero_stage=2)),
]
FROZEN = [
    Case(Degrees(ulysses=2), ONE, 4, frozen=("vision", "projector"), stages=2, schedule="1f1b"),
    Case(ONE, Degrees(data=2), 2, frozen=("vision", "text"), packing=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_equal_the_plain_model(case: Case, four_layers_model: str) -> None:
    assert_exact(compare(four_layers_model, case, awkward_steps()))


@pytest.mark.parametrize("case", TIED, ids=str)
def test_a_weight_of_two_stages_is_one_weight(case: Case, tied_model: str) -> None:
    assert_exact(compare(tied_model, case, awkward_steps()))


@pytest.mark.parametrize("case", TIED_SINGLE, ids=str)
def test_a_weight_of_two_stages_is_one_weight_however_its_states_are_cut(case: Case, tied_model: str) -> None:
    assert_exact_in_single_precision(compare(tied_model, case, awkward_steps()))


@pytest.mark.parametrize("case", STAGED_SINGLE, ids=str)
def test_stages_in_single_precision(case: Case, four_layers_model: str) -> None:
    assert_exact_in_single_precision(compare(four_layers_model, case, awkward_steps()))


@pytest.mark.parametrize("case", FROZEN, ids=str)
def test_what_is_frozen_stays_and_all_else_is_as_in_the_plain_model(case: Case, four_layers_model: str) -> None:
    assert_exact(compare(four_layers_model, case, awkward_steps()))


@pytest.mark.grid
def test_llava_in_stages_and_its_projector_alone(llava_model: str) -> None:
    for case in (
        Case(Degrees(ulysses=2), ONE, 2, stages=2, schedule="1f1b", packing=True),
        Case(ONE, Degrees(tensor=2), 2, frozen=("vision",)),
    ):
        assert_exact(compare(llava_model, case, images_of_one_size()))


class TiedGradientNotAdded(InspectedText):
    """Each stage updates its copy of the embedding with its own share."""

    def grad_norm_sq(self, info: StepInfo, *tied: Bundle) -> float:
        return super().grad_norm_sq(info)


class TiedGradientCountedTwice(InspectedText):
    """Both stages count the embedding in the norm."""

    def __init__(self, settings: Any):
        super().__init__(settings)
        self.optimizer._is_others = lambda name: False


class GradientOfStatesLost(InspectedText):
    """What goes back to the stage before is nothing."""

    def backward_step(self, *given: Any) -> tuple[Bundle, ...]:
        found = super().backward_step(*given)
        lost = lambda name, tensor: torch.zeros_like(tensor) if name == "hidden_states" else tensor
        return tuple(Bundle({n: lost(n, t) for n, t in b.tensors.items()}) for b in found)


FAULTS = [
    ("tied gradient not added", TiedGradientNotAdded, lambda e: e.gradient < 1e-9 < 1e-3 < e.update),
    ("tied gradient counted twice", TiedGradientCountedTwice, lambda e: e.gradient < 1e-9 < 1e-3 < e.norm),
    ("gradient of states lost", GradientOfStatesLost, lambda e: e.loss < 1e-9 < 0.1 < e.gradient),
]


@pytest.mark.parametrize(("fault", "seen"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_planted_mistake_is_seen(fault: type, seen: Any, tied_model: str) -> None:
    errors: Errors = compare(tied_model, TIED[0], [mixed_step()], Fault(text=fault))
    assert seen(errors), errors


TOWERS = {"none": ONE, "data": Degrees(data=2), "sequence": Degrees(ulysses=2)}
SCHEDULES = (("sequential", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
STAGED_GRID = [
    pytest.param(
        Case(TOWERS[vision], Degrees(data=data, tensor=tensor), micro, stages=stages, chunks=chunks, schedule=schedule,
             packing=(data + tensor + stages) % 2 == 0),
        tied, id=f"{stages}-tensor{tensor}-data{data}-{vision}-{micro}-{schedule}-{'tied' if tied else 'own head'}",
    )
    for stages, tensor, data, vision, micro, (schedule, chunks), tied in product(
        (2, 4), (1, 2), (1, 2), TOWERS, (1, 4), SCHEDULES, (False, True)
    )
    if schedule != "interleaved" or (stages == 2 and micro == 4)
]  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize(("case", "tied"), STAGED_GRID)
def test_every_pipeline_equals_the_plain_model(case: Case, tied: bool, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue("tied_model" if tied else "four_layers_model")
    assert_exact(compare(model, case, awkward_steps()))
