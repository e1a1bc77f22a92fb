"""A model that hears and sees, trained in three parts: sharded equals plain, over three optimizer steps."""

from dataclasses import replace
from itertools import product

import pytest

from dhp.core.axes import Degrees
from dhp.core.batch import StepData, TextInput
from dhp.core.parameters import AdapterSettings, GroupRule, Selector
from dhp.data.sample.sample import Sample
from dhp.engine.stage_settings import StageSettings
from dhp.models import lora as adapters
from dhp.models.contract.double import staying_double
from tests.engine.test_declared_families import ExactText, ExactVision
from tests.helpers.alike import assert_exact
from tests.helpers.families import Maker
from tests.helpers.layouts import FIRST_OUT, Case, Errors, Fault, InspectedAudio, compare
from tests.helpers.rows import slow, slow_but
from tests.helpers.tiny_families import save_family

ONE, TWO = Degrees(), Degrees(data=2)
SEQUENCE = Degrees(ulysses=2)
ENCODERS = {"none": ONE, "data": TWO, "sequence": SEQUENCE}
TEXT = {"none": ONE, "data": TWO, "tensor": Degrees(tensor=2)}

Made = tuple[str, list[list[Sample]]]


class ExactAudio(InspectedAudio):
    """Its process computes in float64 all through."""

    def __init__(self, settings: StageSettings):
        self._double = staying_double()
        self._double.__enter__()
        super().__init__(settings)


# Rules named as their parts: projectors and the decoder have the rate of all.
TOWERS = tuple(
    GroupRule(part, (Selector(inside),), 1e-6, None, 2)
    for part, inside in (("vision", "visual.blocks"), ("audio", "audio_tower.layers"))
)
EXACTLY = Fault(ExactVision, ExactText, audio=ExactAudio)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A tiny Qwen3-Omni, and steps of samples with sound, with pictures, with both and with neither."""
    folder = str(save_family("qwen3_omni", tmp_path_factory.mktemp("qwen3_omni")))
    with staying_double():
        return folder, Maker(folder).heard_steps()


def run(made: Made, case: Case, fault: Fault = EXACTLY) -> Errors:
    with staying_double():
        return compare(made[0], case, made[1], fault)


ALWAYS = [
    Case(SEQUENCE, Degrees(tensor=2), 2, packing=True, audio=TWO),
    Case(ONE, TWO, 1, audio=SEQUENCE),
    Case(TWO, Degrees(ring=2), 2, packing=True, audio=SEQUENCE),
    Case(ONE, Degrees(tensor=2), 2, packing=True, audio=ONE, audio_stages=2),
    Case(ONE, TWO, 2, audio=SEQUENCE, audio_stages=2, stages=2, schedule="1f1b"),
]


@pytest.mark.parametrize("case", slow_but(ALWAYS, ALWAYS[1], ALWAYS[3]), ids=str)
def test_equals_the_plain_model(case: Case, made: Made) -> None:
    assert_exact(run(made, case))


def test_groups_named_as_their_parts_have_rates_of_their_own(made: Made) -> None:
    assert_exact(run(made, Case(ONE, ONE, 2, packing=True, audio=ONE, groups=TOWERS)))


LESS = [slow({"frozen": ("audio", "audio_tower.proj?")}), {"trainable": ("audio_tower.proj*",)}]


@pytest.mark.parametrize("trained", LESS, ids=["all but sound", "sound's projector alone"])
def test_equals_the_plain_model_of_which_less_is_trained(trained: dict, made: Made) -> None:
    assert_exact(run(made, Case(ONE, ONE, 2, packing=True, audio=ONE, **trained)))


HEARD = (("audio", AdapterSettings(2, 4.0)), ("text", AdapterSettings(4, 4.0)))


@pytest.mark.parametrize("audio", [slow(TWO), SEQUENCE], ids=str)
def test_adapters_equal_pefts_on_the_plain_model(audio: Degrees, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "FIRST_OUT", FIRST_OUT)
    case = Case(ONE, Degrees(tensor=2), 2, packing=True, audio=audio, lora=HEARD, frozen=("vision",))
    assert_exact(run(made, case))


ZERO = [
    slow(TWO, 1),
    *(pytest.param(*case, marks=pytest.mark.families) for case in product((TWO, SEQUENCE), (1, 2, 3))),
]


@pytest.mark.parametrize(("audio", "stage"), ZERO)
def test_deepspeeds_states_equal_the_plain_model(audio: Degrees, stage: int, made: Made) -> None:
    errors = compare(made[0], Case(ONE, ONE, 2, "float32", packing=True, audio=audio, audio_zero_stage=stage), made[1])
    # In single precision gradients alone say nothing: those of key biases are zero but for rounding.
    assert errors.loss < 1e-5 and errors.norm < 1e-5 and errors.update < 1e-3, errors


def test_without_the_part_its_weights_stay_with_vision(made: Made) -> None:
    folder, steps = made
    silent = [[sample for sample in samples if not sample.clips] for samples in steps]
    with staying_double():
        assert_exact(compare(folder, Case(ONE, ONE, 1), silent, EXACTLY))


STAGED = [
    ({"trainable": ("audio_tower.proj*",)}, TWO),  # the first stage trains nothing
    ({"frozen": ("audio", "audio_tower.proj?")}, ONE),
    ({"lora": HEARD, "frozen": ("vision",)}, TWO),
    ({"audio_zero_stage": 2, "fsdp": True}, TWO),
    ({"audio_zero_stage": 3, "fsdp": True}, SEQUENCE),
]


@pytest.mark.parametrize(
    ("more", "audio"), [STAGED[0], *(pytest.param(*row, marks=pytest.mark.families) for row in STAGED[1:])]
)
def test_stages_equal_the_plain_model(more: dict, audio: Degrees, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "FIRST_OUT", FIRST_OUT)
    assert_exact(run(made, Case(ONE, ONE, 2, packing=True, audio=audio, audio_stages=2, **more)))


def exchange_clips(data: StepData) -> StepData:
    """Rows of the first two clips of a replica, in each other's places."""

    def edit(work: TextInput) -> TextInput:
        if "audio" not in work.placements:
            return work
        first, second = (rows.clone() for rows in (work.placements["audio"][:4], work.placements["audio"][-4:]))
        audio_placement = work.placements["audio"].clone()
        audio_placement[:4], audio_placement[-4:] = second, first
        return replace(work, placements={**work.placements, "audio": audio_placement})

    text = tuple(tuple(edit(work) for work in row) for row in data.work["text"])
    return replace(data, work={**data.work, "text": text})


def test_rows_of_exchanged_clips_show(made: Made) -> None:
    errors = run(made, Case(ONE, ONE, 1, packing=True, audio=ONE), replace(EXACTLY, edit=exchange_clips))
    assert errors.loss > 1e-6 and errors.gradient > 1e-3, errors


MATRIX = [
    pytest.param(audio, vision, text, packing, id=f"{audio}-{vision}-{text}-{'packed' if packing else 'padded'}")
    for audio, vision, text, packing in product(ENCODERS, ENCODERS, TEXT, (True, False))
]


@pytest.mark.families
@pytest.mark.parametrize(("audio", "vision", "text", "packing"), MATRIX)
def test_every_layout_equals_the_plain_model(audio: str, vision: str, text: str, packing: bool, made: Made) -> None:
    assert_exact(run(made, Case(ENCODERS[vision], TEXT[text], 2, packing=packing, audio=ENCODERS[audio])))


@pytest.mark.families
@pytest.mark.parametrize("stage", [2, 3])
def test_cut_states_equal_the_plain_model(stage: int, made: Made) -> None:
    assert_exact(run(made, Case(ONE, ONE, 2, packing=True, audio=TWO, audio_zero_stage=stage, fsdp=True)))


@pytest.mark.families
def test_recomputing_changes_nothing(made: Made) -> None:
    assert_exact(run(made, Case(ONE, ONE, 2, packing=True, checkpointing=True, audio=ONE)))
