"""Adapters in every layout equal peft's on the model."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

from dhp.core.axes import Degrees
from dhp.core.parameters import ADAPTER, AdapterSettings, GroupRule, Selector
from dhp.engine.stage_settings import StageSettings
from dhp.models import lora as adapters
from dhp.parallel.tensor import slices as cutting
from tests.engine.test_declared_families import Made, made, run
from tests.helpers.alike import assert_exact, assert_exact_in_single_precision
from tests.helpers.batches import awkward_steps
from tests.helpers.layouts import (
    Case,
    Fault,
    InspectedText,
    InspectedVision,
    compare,
    compare_rounding,
    train,
    with_part,
)
from tests.helpers.rows import slow
from tests.helpers.tiny_families import FAMILIES

ONE = Degrees()
TEXT = (("text", AdapterSettings(4, 8.0)),)
BOTH = (("vision", AdapterSettings(3, 6.0, rslora=True)), ("text", AdapterSettings(4, 4.0)))
SOME = (("text", AdapterSettings(2, 8.0, targets=("q_proj", "v_proj", "down_proj"))),)
DORA = (("text", AdapterSettings(2, 2.0, dora=True)),)
NORMS = (("vision", AdapterSettings(3, 6.0, dora=True, rslora=True)), ("text", AdapterSettings(2, 3.0, dora=True)))
LAST = (("text", AdapterSettings(2, 4.0, targets=("layers.[23]",))),)
FASTER = (GroupRule("out", (Selector("lora_B"),), 5e-3, 0.0),)
CASES = [
    Case(ONE, ONE, 2, lora=TEXT, frozen=("vision", "projector"), groups=FASTER),
    slow(Case(Degrees(tensor=2), Degrees(tensor=4), 2, lora=BOTH, packing=True)),  # more ranks than key and value heads
    Case(ONE, Degrees(tensor=2), 2, lora=SOME, trainable=("projector", "layers.1"), checkpointing=True),
    slow(Case(ONE, Degrees(data=2), 2, lora=DORA, packing=True)),
    Case(Degrees(tensor=2), Degrees(tensor=2), 2, lora=NORMS, packing=True),
    Case(Degrees(data=2), Degrees(data=2, tensor=2), 2, lora=NORMS, zero_stage=2, text_zero_stage=3, fsdp=True),
    Case(Degrees(data=2), Degrees(data=2), 2, "float32", 1, lora=NORMS, text_zero_stage=3, packing=True),
    *map(
        slow,
        (
            Case(Degrees(tensor=2), Degrees(tensor=4), 2, lora=NORMS, sharded_norms=True, checkpointing=True),
            Case(Degrees(data=2), Degrees(tensor=4), 2, lora=NORMS, zero_stage=3, fsdp=True, mlp_chunks=2),
            Case(Degrees(data=2), Degrees(data=2), 2, "float32", 3, lora=NORMS, text_zero_stage=2),
            Case(ONE, Degrees(data=2), 2, "float32", lora=NORMS, text_zero_stage=1, packing=True, recompute="mlp"),
            Case(Degrees(data=2), Degrees(data=2, tensor=2), 2, lora=NORMS, optimizer="muon", recompute="linear"),
            Case(Degrees(tensor=2), Degrees(tensor=2), 2, lora=NORMS, optimizer="adafactor", recompute="light"),
            Case(ONE, Degrees(ulysses=2, tensor=2), 2, lora=DORA, stages=2, packing=True),
        ),
    ),
]
STAGED = [Case(ONE, ONE, 2, stages=2, lora=LAST, frozen=("vision",))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_peft_on_the_plain_model(case: Case, four_layers_model: str) -> None:
    exact = assert_exact if case.dtype == "float64" else assert_exact_in_single_precision
    exact(compare(four_layers_model, case, awkward_steps()))


@pytest.mark.parametrize("case", STAGED, ids=str)
def test_stages_with_adapters(case: Case, tied_model: str) -> None:
    assert_exact(compare(tied_model, case, awkward_steps()))


@pytest.mark.grid
def test_adapters_in_bfloat16(four_layers_model: str) -> None:
    case = Case(ONE, Degrees(data=2, tensor=2), 2, "bfloat16", lora=TEXT, frozen=("vision", "projector"), packing=True)
    ratios = compare_rounding(four_layers_model, case, awkward_steps())
    assert max(ratios.loss, ratios.gradient, ratios.update) < 2.5, ratios


class CompiledVision(InspectedVision):
    def __init__(self, settings: StageSettings):
        super().__init__(_compiled(settings))


class CompiledText(InspectedText):
    def __init__(self, settings: StageSettings):
        super().__init__(_compiled(settings))


def _compiled(settings: StageSettings) -> StageSettings:
    """For a rank's process: graphs are made, and run operation by operation; kernels of them would take minutes."""
    torch.compile = partial(torch.compile, backend="eager")
    return with_part(settings, compile=True)


COMPILED = [
    slow(Case(ONE, ONE, 2, lora=TEXT, frozen=("vision", "projector"), packing=True)),
    *(pytest.param(Case(ONE, Degrees(data=2), 2, lora=own), marks=pytest.mark.families) for own in (BOTH, SOME, DORA)),
]


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiled_layers_with_adapters(case: Case, four_layers_model: str) -> None:
    assert_exact(compare(four_layers_model, case, awkward_steps()[:1], Fault(CompiledVision, CompiledText)))


class OutputNotSummed(InspectedText):
    """What a slice of A makes is taken for the whole."""

    def adapt(self) -> None:
        with patch.object(cutting, "_leave", lambda *_: None):
            super().adapt()


class InputNotEntered(InspectedText):
    """Each rank has the gradient of A, and of what enters it, that its own rows give."""

    def adapt(self) -> None:
        with patch.object(cutting, "_enter", lambda *_: None):
            super().adapt()


class SquaresNotSummed(InspectedText):
    """The norm of a rank's slice of a row is taken for the row's, once the first norms are there."""

    def adapt(self) -> None:
        super().adapt()
        for _, layer in adapters.adapted_modules(self.model):
            layer.lora_variant[ADAPTER]._squares_over = None


FAULTS = [(OutputNotSummed, TEXT), (InputNotEntered, TEXT), (SquaresNotSummed, DORA)]


@pytest.mark.parametrize(("fault", "lora"), FAULTS, ids=lambda own: getattr(own, "__name__", ""))
def test_an_adapter_that_is_not_cut_as_its_matrix_shows(
    fault: type[InspectedText], lora: tuple[tuple[str, AdapterSettings], ...], four_layers_model: str
) -> None:
    case = Case(ONE, Degrees(tensor=2), 2, lora=lora)
    found = compare(four_layers_model, case, awkward_steps(), Fault(text=fault))
    assert found.gradient > 1e-2, found


@pytest.mark.slow
def test_what_is_recomputed_drops_out_what_it_dropped_before(four_layers_model: str) -> None:
    dropping = (("text", AdapterSettings(4, 8.0, dropout=0.3)),)
    choices = ("none", "all", "linear", "mlp", "light")
    cases = [Case(ONE, Degrees(tensor=2), 2, lora=dropping, recompute=choice) for choice in choices]
    plain, *again = (train(four_layers_model, case, awkward_steps()[:1]) for case in cases)
    for other in again:
        assert other.losses == pytest.approx(plain.losses, rel=1e-12)
        for mine, theirs in zip(other.gradients[0], plain.gradients[0], strict=True):
            for name, gradient in theirs.items():
                torch.testing.assert_close(mine[name], gradient, rtol=1e-9, atol=1e-12)


def test_what_adapters_begin_with_is_the_models_own_output() -> None:
    values = adapters.first_values("a.lora_A", (4, 9), 1)
    assert values.abs().max() <= 1 / 3 and values.std() > 0.15
    assert not torch.equal(values, adapters.first_values("b.lora_A", (4, 9), 1))
    assert not torch.equal(values, adapters.first_values("a.lora_A", (4, 9), 2))


__all__ = ["made"]  # a fixture
BOTH_PARTS = (("vision", AdapterSettings(2, 4.0)), ("text", AdapterSettings(4, 8.0)))
CASE = Case(Degrees(), Degrees(tensor=2), 2, packing=True, lora=BOTH_PARTS)
ALWAYS = ["qwen3_5_moe", "kimi_k25", "gemma3"]  # gated delta nets and a shared expert; latent attention; tied, windows
OTHERS = [pytest.param(name, marks=pytest.mark.families) for name in FAMILIES if name not in ALWAYS]


@pytest.mark.parametrize("name", [*map(slow, ALWAYS), *OTHERS])
def test_adapters_of_families_equal_peft_on_the_plain_model(name: str, made: dict[str, Made]) -> None:
    assert_exact(run(made[name], CASE))


@pytest.mark.slow
def test_experts_trained_whole_beside_adapters(made: dict[str, Made]) -> None:
    """Of a group of replicas that share experts out, each has all adapters, those of shared experts among them."""
    case = Case(Degrees(), Degrees(data=2, expert=2), 2, packing=True, lora=BOTH_PARTS[1:], trainable=("mlp.experts",))
    assert_exact(run(made["kimi_k25"], case))


BY_EXPERT = Case(Degrees(data=2), Degrees(data=2, expert=2), 2, packing=True, lora=BOTH_PARTS)
MORE = [
    *((name, BY_EXPERT) for name in ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "gemma4_moe", "ernie4_5_vl_moe")),
    ("qwen3_omni", replace(BY_EXPERT, recompute="mlp")),
    ("kimi_k25", replace(CASE, trainable=("mlp.experts",))),  # of which each rank has a slice of the width
    ("qwen3_5", Case(Degrees(), Degrees(data=2), 2, packing=True, lora=BOTH_PARTS, stages=2, recompute="light")),
    ("glm4v", Case(Degrees(tensor=2), Degrees(tensor=2), 2, packing=True, lora=BOTH_PARTS, recompute="mlp")),
    ("qwen2_vl", Case(Degrees(tensor=2), Degrees(tensor=4), 2, lora=BOTH_PARTS, recompute="light")),
    *((name, replace(CASE, lora=NORMS)) for name in ("kimi_k25", "qwen3_5_moe", "gemma3", "glm4v_moe")),
    ("glm4v", Case(Degrees(tensor=2), Degrees(tensor=2), 2, packing=True, lora=NORMS, sharded_norms=True)),
    ("qwen3_vl_moe", replace(BY_EXPERT, lora=NORMS, text_zero_stage=3, fsdp=True)),
]


@pytest.mark.families
@pytest.mark.parametrize(("name", "case"), MORE, ids=str)
def test_other_layouts(name: str, case: Case, made: dict[str, Made]) -> None:
    assert_exact(run(made[name], case))


OF_EXPERTS = (("text", AdapterSettings(2, 3.0, targets=("experts", "q_proj"))),)
DOWN = (("text", AdapterSettings(2, 3.0, rslora=True, targets=("experts.down_proj",))),)
EXPERTS = [
    ("qwen3_vl_moe", Case(ONE, Degrees(data=2), 2, lora=OF_EXPERTS, frozen=("vision", "projector"))),
    ("qwen3_vl_moe", Case(ONE, ONE, 2, packing=True, stages=2, lora=DOWN, checkpointing=True)),
    slow("qwen3_5_moe", Case(ONE, Degrees(data=2), 2, packing=True, lora=OF_EXPERTS, recompute="mlp")),
    slow("qwen3_vl_moe", Case(ONE, Degrees(ulysses=2), 2, packing=True, lora=OF_EXPERTS)),
    slow("qwen3_vl_moe", Case(ONE, Degrees(ring=2), 2, packing=True, lora=DOWN)),
    *(
        pytest.param(name, Case(ONE, Degrees(data=2), 2, packing=True, lora=OF_EXPERTS), marks=pytest.mark.families)
        for name in ("kimi_k25", "glm4v_moe", "gemma4_moe", "ernie4_5_vl_moe", "qwen3_omni")
    ),
]


@pytest.mark.parametrize(("name", "case"), EXPERTS, ids=str)
def test_adapters_of_experts_equal_peft_on_the_plain_model(name: str, case: Case, made: dict[str, Made]) -> None:
    assert_exact(run(made[name], case))
