"""Dropout draws alike in every layout."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dhp.batch import row_shards, shard
from dhp.core.axes import Degrees
from dhp.core.batch import StepData
from dhp.core.draws import TokenKeys, drawing, keys_of
from dhp.core.parameters import ADAPTER, AdapterSettings
from dhp.engine.stage_settings import StageSettings
from dhp.models import lora as adapters
from dhp.parallel.recompute import recomputed_layers as recomputing
from tests.engine.test_adapters import CompiledText, CompiledVision
from tests.engine.test_audio import EXACTLY as SOUND_EXACTLY
from tests.engine.test_audio import Made as MadeSound
from tests.engine.test_audio import made as sound_model
from tests.engine.test_declared_families import EXACTLY, Made, made, run, staying_double
from tests.engine.test_families import ExactText
from tests.engine.test_families import equal_pictures as images_of_one_size
from tests.engine.test_families import steps as images_and_videos
from tests.helpers.alike import assert_alike, assert_exact, assert_exact_in_single_precision
from tests.helpers.batches import awkward_steps, mixed_step, step_with_one_window
from tests.helpers.layouts import Case, Fault, InspectedText, compare, compare_rounding, train
from tests.helpers.norms import exact_norms
from tests.helpers.rows import on_demand, slow, slow_but
from tests.helpers.tiny_families import FAMILIES

ONE = Degrees()
TEXT = (("text", AdapterSettings(4, 8.0, dropout=0.1)),)
BOTH = (("vision", AdapterSettings(3, 6.0, rslora=True, dropout=0.1)), ("text", AdapterSettings(4, 4.0, dropout=0.1)))
ALL = (
    ("vision", AdapterSettings(2, 4.0, targets=("visual",), dropout=0.1)),  # mergers, too
    ("text", AdapterSettings(2, 4.0, dropout=0.3)),
)
DORA = (("text", AdapterSettings(2, 2.0, dora=True, dropout=0.1)),)
CASES = [
    Case(ONE, ONE, 2, lora=BOTH),
    Case(Degrees(ulysses=2), Degrees(tensor=2), 2, lora=BOTH, packing=True),
    Case(Degrees(tensor=2), Degrees(ring=2), 1, lora=ALL, mlp_chunks=3, recompute="mlp"),
    Case(Degrees(tensor=2), Degrees(tensor=4), 2, lora=BOTH, sharded_norms=True, mlp_chunks=3, checkpointing=True),
    Case(Degrees(data=2), Degrees(data=3), 2, lora=BOTH, zero_stage=2, text_zero_stage=3, fsdp=True),
    Case(ONE, Degrees(tensor=2), 2, lora=ALL, stages=2, tower_stages=2, schedule="1f1b", packing=True),
    *map(
        on_demand,
        (
            Case(ONE, ONE, 1, lora=DORA, packing=True),
            Case(ONE, Degrees(tensor=2), 2, lora=DORA, packing=True),
            Case(ONE, Degrees(tensor=4), 2, lora=DORA, sharded_norms=True),
            Case(ONE, Degrees(data=2), 2, "float32", lora=DORA, text_zero_stage=3),
            Case(Degrees(ring=2), Degrees(ulysses=2, ring=2), 2, lora=BOTH, sequence_groups="auto"),
            Case(Degrees(ulysses=2, ring=2), Degrees(ulysses=2, tensor=2), 2, lora=ALL),
            Case(Degrees(data=2, ulysses=2), Degrees(data=2, ring=2), 1, lora=ALL, recompute="light"),
            Case(Degrees(tensor=2), Degrees(tensor=2), 2, lora=ALL, sharded_norms=True, packing=True),
            Case(Degrees(tensor=2), Degrees(tensor=2, ring=2), 1, lora=BOTH, sharded_norms=True, mlp_chunks=2),
            Case(ONE, Degrees(data=2, tensor=2), 2, lora=BOTH, text_zero_stage=3, fsdp=True, recompute="linear"),
            Case(Degrees(data=2), Degrees(data=2), 2, lora=BOTH, zero_stage=3, text_zero_stage=2, fsdp=True),
            Case(Degrees(data=2), Degrees(data=2), 2, lora=BOTH, recompute="offload", mlp_chunks=2),
            Case(Degrees(data=2), Degrees(data=2), 2, "float32", 1, lora=BOTH, text_zero_stage=2),
            Case(Degrees(data=2), Degrees(data=2), 2, "float32", 3, lora=BOTH, text_zero_stage=3, packing=True),
            Case(ONE, Degrees(data=2), 2, lora=BOTH, stages=2, chunks=2, schedule="interleaved"),
            Case(Degrees(ulysses=2), Degrees(ring=2), 4, lora=BOTH, stages=4, tower_stages=2, schedule="gpipe"),
        ),
    ),
]
OTHERS = {
    "llava_model": [Case(Degrees(ulysses=2), Degrees(tensor=2), 2, lora=ALL[1:] + (("vision", BOTH[0][1]),))],
    "qwen3_vl_model": [
        on_demand(
            Case(Degrees(tensor=2), Degrees(tensor=2), 2, lora=ALL, stages=2, tower_stages=2, sharded_norms=True)
        ),
        on_demand(Case(Degrees(ulysses=2), Degrees(ring=2), 1, lora=ALL, packing=True)),
    ],
}


@pytest.mark.parametrize("case", slow_but(CASES, CASES[0], CASES[1]), ids=str)
def test_equals_the_plain_model(case: Case, four_layers_model: str) -> None:
    exact = assert_exact if case.dtype == "float64" else assert_exact_in_single_precision
    exact(compare(four_layers_model, case, awkward_steps()))


@pytest.mark.parametrize("case", OTHERS["llava_model"], ids=str)
@pytest.mark.slow
def test_images_of_one_size_equal_the_plain_model(case: Case, llava_model: str) -> None:
    """Layers see a class token beside the patches."""
    assert_exact(compare(llava_model, case, images_of_one_size()))


@pytest.mark.parametrize("case", OTHERS["qwen3_vl_model"], ids=str)
def test_features_of_inner_layers_equal_the_plain_model(case: Case, qwen3_vl_model: str) -> None:
    """Images and videos through mergers behind several layers of the tower."""
    with exact_norms():
        assert_exact(compare(qwen3_vl_model, case, images_and_videos(), Fault(text=ExactText)))


@pytest.mark.grid
def test_in_bfloat16(four_layers_model: str) -> None:
    case = Case(ONE, Degrees(data=2, tensor=2), 2, "bfloat16", lora=TEXT, frozen=("vision", "projector"), packing=True)
    ratios = compare_rounding(four_layers_model, case, awkward_steps())
    assert max(ratios.loss, ratios.gradient, ratios.update) < 2.5, ratios


@pytest.mark.slow
def test_compiled_layers_equal_the_plain_model(four_layers_model: str) -> None:
    case = Case(ONE, ONE, 2, lora=BOTH, packing=True)
    assert_exact(compare(four_layers_model, case, awkward_steps()[:1], Fault(CompiledVision, CompiledText)))


class Watched(InspectedText):
    """No rank's generator moves."""

    def __init__(self, settings: StageSettings):
        super().__init__(settings)
        self._before = torch.get_rng_state()

    def optimizer_step(self, *given: Any) -> Any:
        assert torch.equal(torch.get_rng_state(), self._before)
        return super().optimizer_step(*given)


def test_no_generator_is_asked(four_layers_model: str) -> None:
    case = Case(ONE, Degrees(data=2), 2, lora=BOTH, checkpointing=True, mlp_chunks=2)
    assert_exact(compare(four_layers_model, case, awkward_steps(), Fault(text=Watched)))


@pytest.mark.parametrize("choice", [slow("none"), slow("linear"), slow("mlp"), "light"])
def test_what_is_recomputed_drops_out_what_it_dropped_before(choice: str, four_layers_model: str) -> None:
    case = Case(ONE, Degrees(tensor=2), 1, lora=BOTH, recompute="all", stages=2, schedule="1f1b")
    plain = train(four_layers_model, case, [mixed_step()])
    other = train(four_layers_model, replace(case, recompute=choice), [mixed_step()])
    assert other.losses == pytest.approx(plain.losses, rel=1e-12)
    for mine, theirs in zip(other.gradients[0], plain.gradients[0], strict=True):
        for name, gradient in theirs.items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-9, atol=1e-12)


class ColumnsNotMoved(InspectedText):
    """Each rank takes its columns for the first ones."""

    def adapt(self) -> None:
        super().adapt()
        for _, layer in adapters.adapted_modules(self.model):
            layer.lora_dropout[ADAPTER].first_column = 0


class KeysOfAnother(InspectedText):
    """A layer that runs again draws by whatever tokens are computed then."""

    def __init__(self, settings: StageSettings):
        recomputing.drawing = lambda _: drawing(TokenKeys(keys_of([(1, 0, 1)]), tile=1))
        super().__init__(settings)


def numbered_by_rank(data: StepData) -> StepData:
    """Each rank counts its own rows through."""
    count = lambda work: replace(work, draws=((1, 0, sum(run[2] for run in work.draws)),))
    return replace(data, work={**data.work, "text": tuple(tuple(map(count, row)) for row in data.work["text"])})


FAULTS = {
    "columns": (Case(ONE, Degrees(tensor=2), 1, lora=TEXT), Fault(text=ColumnsNotMoved)),
    "recompute": (Case(ONE, ONE, 1, lora=TEXT, checkpointing=True), Fault(text=KeysOfAnother)),
    "ranks": (Case(ONE, Degrees(ring=2), 1, lora=TEXT), Fault(edit=numbered_by_rank)),
    "replicas": (Case(ONE, Degrees(data=2), 1, lora=TEXT), Fault(edit=numbered_by_rank)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_other_draws_show(name: str, four_layers_model: str) -> None:
    case, fault = FAULTS[name]
    found = compare(four_layers_model, case, [mixed_step()], fault)
    assert found.gradient > 1e-2, found


def test_steps_that_draw_alike_show(four_layers_model: str) -> None:
    with patch.object(
        shard, "sample_keys", lambda samples, seed: row_shards.sample_keys(replace(samples, step=0), seed)
    ):
        found = compare(four_layers_model, Case(ONE, ONE, 1, lora=TEXT), [mixed_step(), step_with_one_window()])
    assert found.gradient > 1e-2, found


__all__ = ["made", "sound_model"]  # fixtures
FAMILY_TEXT = (("text", AdapterSettings(4, 8.0, dropout=0.2)),)
VISION = (("vision", AdapterSettings(2, 4.0, dropout=0.2)),)
ALWAYS = ["qwen3_5_moe", "kimi_k25"]  # gated delta nets and a shared expert; latent attention
OTHER_NAMES = [pytest.param(name, marks=pytest.mark.families) for name in FAMILIES if name not in ALWAYS]


@pytest.mark.parametrize("name", [*slow_but(ALWAYS, "kimi_k25"), *OTHER_NAMES])
def test_decoders_equal_the_plain_model(name: str, made: dict[str, Made]) -> None:
    assert_exact(run(made[name], Case(ONE, Degrees(tensor=2), 2, packing=True, lora=FAMILY_TEXT, recompute="mlp")))


LAYOUTS = {"sequence": Degrees(ulysses=2), "data": Degrees(data=2)}


@pytest.mark.families
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_towers_are_alike(name: str, layout: str, made: dict[str, Made]) -> None:
    """Of a tower that takes pictures whole, the plain model takes several at once, so that a row has no picture."""
    with staying_double():
        plain = train(made[name].folder, Case(ONE, ONE, 1, packing=True, lora=VISION), made[name].steps, EXACTLY)
        case = Case(LAYOUTS[layout], Degrees(data=2), 2, lora=VISION)
        other = train(made[name].folder, case, made[name].steps, EXACTLY)
    assert_alike(plain, other)


SOUND_TEXT = ("text", AdapterSettings(4, 8.0, dropout=0.2))
SOUND = (
    ("audio", AdapterSettings(2, 4.0, targets=("audio_tower",), dropout=0.2)),
    SOUND_TEXT,
)  # convolutions' rows, too
HEARING = [
    Case(ONE, Degrees(tensor=2), 2, audio=Degrees(ulysses=2), lora=SOUND, frozen=("vision",), checkpointing=True),
    Case(ONE, ONE, 1, audio=Degrees(data=2), audio_stages=2, lora=SOUND, frozen=("vision",), packing=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but(HEARING, HEARING[1]), ids=str)
def test_towers_of_sound_are_alike(case: Case, sound_model: MadeSound) -> None:
    with staying_double():
        alone = Case(ONE, ONE, 1, packing=True, audio=ONE, lora=SOUND, frozen=("vision",))
        plain, other = (train(sound_model[0], one, sound_model[1], SOUND_EXACTLY) for one in (alone, case))
    assert_alike(plain, other)


def test_drawing_by_the_place_in_a_rank_shows(sound_model: MadeSound) -> None:
    """Clips of which each rank takes the first for the same one."""

    def alike(data: StepData) -> StepData:
        of_ranks = lambda row: tuple(replace(one, draws=tuple((1, n, 1) for n in range(len(one.draws)))) for one in row)
        return replace(data, work={**data.work, "audio": tuple(map(of_ranks, data.work["audio"]))})

    case = Case(ONE, ONE, 1, packing=True, audio=ONE, lora=SOUND, frozen=("vision",))
    fault = replace(SOUND_EXACTLY, edit=alike)
    with staying_double():
        plain, other = (
            train(sound_model[0], case, sound_model[1], SOUND_EXACTLY),
            train(sound_model[0], case, sound_model[1], fault),
        )
    with pytest.raises(AssertionError):
        assert_alike(plain, other)
