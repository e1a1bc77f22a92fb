"""Every declared family, and ranks with unlike data."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest

from dhp.batch import shard
from dhp.batch.encoder_shards import Encoder
from dhp.config.layout import check_mlp_chunks, resolve_part
from dhp.config.schema import PartConfig
from dhp.core.axes import Degrees
from dhp.core.errors import ConfigError
from dhp.core.parameters import AdapterSettings
from dhp.data.sample.sample import Sample
from dhp.engine.stage_settings import StageSettings
from dhp.models import lora as adapters
from dhp.models.contract.double import staying_double
from dhp.models.registry import load_family
from tests.helpers import ranks
from tests.helpers.alike import assert_exact
from tests.helpers.batches import mixed_step, step_without_image
from tests.helpers.families import Maker
from tests.helpers.layouts import (
    FIRST_OUT,
    Case,
    Errors,
    Fault,
    InspectedText,
    InspectedVision,
    _slotted,
    compare,
    make_sharder,
)
from tests.helpers.rows import slow, slow_but
from tests.helpers.tiny import make_sample
from tests.helpers.tiny_families import BEGIN, END, FAMILIES, IMAGE, VIDEO, save_family

VISION = {"none": Degrees(), "data": Degrees(data=2), "sequence": Degrees(ulysses=2)}
TEXT = {"none": Degrees(), "data": Degrees(data=2), "tensor": Degrees(tensor=2)}
# Layers that need more than the states of the one before: per-layer inputs, keys of other layers.
WITHOUT_PIPELINE = {"gemma4"}
# Some of whose weights no text-only sample touches, where plain AdamW passes them over and a step here decays them.
PICTURES_EVERYWHERE = {"ernie4_5_vl_moe", "llama4"}


class ExactVision(InspectedVision):
    """Its process computes in float64 all through."""

    def __init__(self, settings: StageSettings):
        self._double = staying_double()
        self._double.__enter__()
        super().__init__(settings)


class ExactText(InspectedText):
    """Its process computes in float64 all through."""

    def __init__(self, settings: StageSettings):
        self._double = staying_double()
        self._double.__enter__()
        super().__init__(settings)


EXACTLY = Fault(ExactVision, ExactText)


@dataclass(frozen=True)
class Made:
    """A tiny model and steps of samples, made once."""

    folder: str
    steps: list[list[Sample]]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Made]]:
    """Models by the name of the case, as they are asked for."""

    class Models(dict[str, Made]):
        def __missing__(self, name: str) -> Made:
            folder = str(save_family(name, tmp_path_factory.mktemp(name)))
            with staying_double():
                self[name] = Made(folder, Maker(folder).steps(name in PICTURES_EVERYWHERE))
            return self[name]

    return Models()


def run(model: Made, case: Case) -> Errors:
    with staying_double():
        return compare(model.folder, case, model.steps, EXACTLY)


CASES = [
    pytest.param(name, vision, text, packing, id=f"{name}-{vision}-{text}-{'packed' if packing else 'padded'}")
    for name, vision, text, packing in product(FAMILIES, VISION, TEXT, (True, False))
]


@pytest.mark.families
@pytest.mark.parametrize(("name", "vision", "text", "packing"), CASES)
def test_equals_the_plain_model(name: str, vision: str, text: str, packing: bool, made: dict[str, Made]) -> None:
    assert_exact(run(made[name], Case(VISION[vision], TEXT[text], 2, packing=packing)))


@pytest.mark.families
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WITHOUT_PIPELINE])
def test_a_decoder_cut_by_layers_equals_the_plain_model(name: str, packing: bool, made: dict[str, Made]) -> None:
    assert_exact(run(made[name], Case(Degrees(), Degrees(), 2, packing=packing, stages=2)))


CHAINS = {
    "2+2": Case(Degrees(), Degrees(), 2, packing=True, tower_stages=2, stages=2, schedule="1f1b"),
    "2+2 padded, tensor 2": Case(Degrees(tensor=2), Degrees(tensor=2), 2, tower_stages=2, stages=2, schedule="gpipe"),
    "2+1 of two replicas": Case(Degrees(data=2), Degrees(data=2), 1, packing=True, tower_stages=2),
}
IN_STAGES = ("qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm46v", "glm4v_moe", "qwen3_omni")
ALWAYS_IN_STAGES = ("glm4v", "2+2")  # a decoder by contract


@pytest.mark.parametrize(
    ("name", "chain"),
    [
        pytest.param(name, chain, marks=[] if (name, chain) == ALWAYS_IN_STAGES else pytest.mark.families)
        for name, chain in product(IN_STAGES, CHAINS)
    ],
)
def test_a_tower_and_a_decoder_in_stages_equal_the_plain_model(name: str, chain: str, made: dict[str, Made]) -> None:
    assert_exact(run(made[name], CHAINS[chain]))


SHARED = {"ulysses": Degrees(ulysses=2), "ring": Degrees(ring=2)}


@pytest.mark.families
@pytest.mark.parametrize("layout", SHARED)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_shared_sequence_equals_the_plain_model_or_is_refused(name: str, layout: str, made: dict[str, Made]) -> None:
    degrees, decoder = SHARED[layout], load_family(made[name].folder).decoder
    asked = PartConfig(parallelism="sequence", num_actors=2, ring=degrees.ring, ulysses=degrees.ulysses)
    if (decoder.block_rule and degrees.ring > 1) or name == "ovis2":
        with pytest.raises(ConfigError, match="see each other both ways|without the other"):
            decoder.check(resolve_part("text", asked))
        return
    decoder.check(resolve_part("text", asked))
    assert_exact(run(made[name], Case(Degrees(), degrees, 2, packing=True)))


SHARED_STATE = {
    "recomputed": Case(Degrees(ulysses=2), Degrees(ulysses=2), 2, recompute="light", checkpointing=True),
    "tensor": Case(Degrees(), Degrees(ring=2, tensor=2), 1, recompute="all"),
    "pipeline": Case(Degrees(), Degrees(ulysses=2), 2, stages=2, schedule="1f1b"),
    "replicas, FSDP2": Case(Degrees(data=2), Degrees(data=2, ring=2), 1, text_zero_stage=3, fsdp=True),
    "ZeRO-3": Case(Degrees(), Degrees(data=2, ulysses=2), 1, "float32", text_zero_stage=3, checked=True),
    "adapters": Case(Degrees(), Degrees(ulysses=2), 1, lora=(("text", AdapterSettings(4, 8.0)),)),
    "tensor, adapters": Case(Degrees(), Degrees(tensor=2), 2, lora=(("text", AdapterSettings(4, 8.0)),)),
    "tensor, FSDP2": Case(Degrees(data=2), Degrees(data=2, tensor=2), 2, text_zero_stage=2, fsdp=True),
    # More ranks than the two key heads: state is passed on, by the ring alone or by all.
    "passed around a ring": Case(Degrees(), Degrees(ring=2, ulysses=2), 2, recompute="all"),
    "passed on, FSDP2": Case(Degrees(), Degrees(ring=4), 1, text_zero_stage=3, fsdp=True),
    "passed on, pipeline": Case(Degrees(), Degrees(ulysses=3), 2, stages=2, schedule="1f1b"),
    "passed on, tensor": Case(Degrees(), Degrees(ring=3, tensor=2), 1, lora=(("text", AdapterSettings(4, 8.0)),)),
    "passed on, float32": Case(Degrees(), Degrees(ring=3), 1, "float32", checked=True),
}
ALWAYS_SHARED = "recomputed"


@pytest.mark.parametrize("layout", [slow(name) if name != ALWAYS_SHARED else name for name in SHARED_STATE])
def test_state_along_a_row_that_ranks_share_equals_the_plain_model(layout: str, made: dict[str, Made]) -> None:
    check(made["qwen3_5"], replace(SHARED_STATE[layout], packing=True), made["qwen3_5"].steps)


@pytest.mark.families
@pytest.mark.parametrize("choice", ["all", "mlp", "light"])
@pytest.mark.parametrize("name", FAMILIES)
def test_recomputing_changes_nothing(name: str, choice: str, made: dict[str, Made]) -> None:
    assert_exact(run(made[name], Case(Degrees(), Degrees(), 2, packing=True, recompute=choice)))


@pytest.mark.families
@pytest.mark.parametrize("name", FAMILIES)
def test_mlps_in_chunks_change_nothing_or_are_refused(name: str, made: dict[str, Made]) -> None:
    family = load_family(made[name].folder)
    asked = PartConfig(data=1, ulysses=1, ring=1, tensor=1, pipeline=1, mlp_chunks=3)
    for part in ("vision", "text"):
        try:
            family.parts[part].check(asked)
            check_mlp_chunks(part, asked, family.parts[part].layers.mlp)
        except ConfigError:
            return
    assert_exact(run(made[name], Case(Degrees(), Degrees(), 2, packing=True, mlp_chunks=3)))


BY_TOKEN = {
    "ring": (Degrees(ring=2), Degrees()),
    "both": (Degrees(ulysses=2, ring=2), Degrees(tensor=2)),
    "tensor": (Degrees(tensor=2), Degrees(tensor=2)),
}
# Families whose tower takes any run of patches, beside Qwen2.5-VL and Qwen3-VL, which have tests of their own.
GRIDS = ["qwen2_vl", "qwen3_5", "qwen3_5_moe", "glm4v", "glm46v", "glm4v_moe", "kimi_k25", "qwen3_omni"]


@pytest.mark.families
@pytest.mark.parametrize("layout", BY_TOKEN)
@pytest.mark.parametrize("name", GRIDS)
def test_a_tower_by_token_equals_the_plain_model(name: str, layout: str, made: dict[str, Made]) -> None:
    assert_exact(run(made[name], Case(*BY_TOKEN[layout], 2, packing=True)))


# Families with videos, beside Qwen2.5-VL and Qwen3-VL, and whether steps in time stand apart in the prompt.
MOVING = {"qwen2_vl": False, "qwen3_5": True, "qwen3_5_moe": True, "glm4v": True, "glm46v": True, "glm4v_moe": True}
MOVING["qwen3_omni"] = False
OF_VIDEOS = {
    "whole": Case(Degrees(), Degrees(), 2, packing=True, checkpointing=True),
    "by-image": Case(Degrees(data=2), Degrees(tensor=2), 1),
    "by-token": Case(Degrees(ulysses=2), Degrees(data=2), 1, packing=True),
    "by-token-ring": Case(Degrees(ring=2), Degrees(), 2, stages=2),
}


def with_videos(name: str) -> list[list[Sample]]:
    """A video alone, an image alone and text alone; then a video of three steps. GLM's plain model takes no
    conversation with both."""
    sizes = {"image_token": IMAGE, "video_token": VIDEO, "values": 96, "stamped": MOVING[name], "around": (BEGIN, END)}
    clip = lambda steps, seed: make_sample([(steps, 4, 6)], 5, 3, seed, seconds=(0.5,), **sizes)
    still = lambda seed: make_sample([(1, 4, 4)], 5, 2, seed, **sizes)
    text = lambda seed: make_sample([], 6, 3, seed, **sizes)
    mixed = text(8)
    if not name.startswith("glm"):
        mixed = make_sample([(1, 4, 4), (2, 2, 4)], 5, 2, 8, seconds=(None, 1.0), **sizes)
    return [[clip(2, 1), still(2), text(3), mixed], [clip(3, 4), text(5), text(6), clip(1, 7)]]


@pytest.mark.families
@pytest.mark.parametrize("layout", OF_VIDEOS)
@pytest.mark.parametrize("name", MOVING)
def test_videos_equal_the_plain_model(name: str, layout: str, made: dict[str, Made]) -> None:
    assert_exact(run(Made(made[name].folder, with_videos(name)), OF_VIDEOS[layout]))


@pytest.mark.parametrize("name", [slow("qwen3_5"), "glm46v"])
def test_videos_by_token_equal_the_plain_model(name: str, made: dict[str, Made]) -> None:
    assert_exact(run(Made(made[name].folder, with_videos(name)), Case(Degrees(ulysses=2), Degrees(), 1, packing=True)))


ALWAYS = [
    ("llava_next", Case(Degrees(ulysses=2), Degrees(tensor=2), 2, packing=True)),  # a parameter that is no module's
    ("gemma4", Case(Degrees(), Degrees(tensor=2), 2, packing=True)),  # inputs of each layer, a cap on the logits
    ("qwen3_5_moe", Case(Degrees(), Degrees(tensor=2), 1, packing=True, recompute="light")),  # state along the row
    ("glm4v", Case(Degrees(ring=2), Degrees(tensor=2), 2)),  # frames by their lengths; gate and up in one matrix
    ("kimi_k25", Case(Degrees(ulysses=2), Degrees(), 2, packing=True)),  # patches by rows of the picture
]
QUICK = [ALWAYS[3]]


@pytest.mark.parametrize(("name", "case"), slow_but(ALWAYS, *QUICK), ids=[name for name, _ in ALWAYS])
def test_each_mechanism_equals_the_plain_model(name: str, case: Case, made: dict[str, Made]) -> None:
    assert_exact(run(made[name], case))


SHARDED = [
    "qwen3_5_moe",  # layers that carry state along the row, a router with experts and one beside them
    pytest.param("gemma3", marks=pytest.mark.families),
    pytest.param("glm4v_moe", marks=pytest.mark.families),
    pytest.param("qwen3_omni", marks=pytest.mark.families),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_norms_equal_the_plain_model(name: str, made: dict[str, Made]) -> None:
    vision = Degrees(tensor=2) if load_family(made[name].folder).tower.divisible else Degrees()
    assert_exact(run(made[name], Case(vision, Degrees(tensor=2), 2, packing=True, sharded_norms=True)))


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


UNEVEN = [
    ("llava_next", FSDP),  # a tower called once for each shape of pictures
    ("llava_next", DEEPSPEED),
    # Experts that only tokens of pictures visit, so that a rank may have none for them.
    ("ernie4_5_vl_moe", FSDP),
    ("ernie4_5_vl_moe", DEEPSPEED),
    ("ernie4_5_vl_moe", Case(ONE, Degrees(ring=2), 2, packing=True, checked=True)),
    ("ernie4_5_vl_moe", Case(ONE, Degrees(data=2, expert=2), 2, packing=True, checked=True)),
    ("ernie4_5_vl_moe", Case(ONE, Degrees(data=2, tensor=2), 2, packing=True, checked=True)),
    (
        "ernie4_5_vl_moe",
        Case(ONE, Degrees(data=4, expert=2), 1, text_zero_stage=3, fsdp=True, packing=True, checked=True),
    ),
    ("ernie4_5_vl_moe", Case(ONE, Degrees(data=2, expert=2, tensor=2, ring=2), 2, packing=True, checked=True)),
]


@pytest.mark.parametrize(("name", "case"), slow_but(UNEVEN, UNEVEN[4]), ids=str)
def test_ranks_call_alike(name: str, case: Case, made: dict[str, Made]) -> None:  # noqa: F811
    check(made[name], case, uneven_steps(made[name].folder))


@pytest.mark.families
@pytest.mark.parametrize("case", [FSDP, DEEPSPEED], ids=["fsdp", "deepspeed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_of_every_family(name: str, case: Case, made: dict[str, Made]) -> None:  # noqa: F811
    check(made[name], case, uneven_steps(made[name].folder, name in PICTURES_EVERYWHERE))


def check(model: Made, case: Case, steps: list[list[Sample]], fault: Fault | None = None) -> None:
    if case.dtype == "float64":
        assert_exact(run(Made(model.folder, steps), case))
        return
    # Gradients that are small beside the whole one differ by 1e-3 in float32, on one plain rank as well, and of a delta
    # net all do by 1e-4.
    errors = compare(model.folder, case, steps, fault or Fault())
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


@pytest.mark.slow
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


class TakesEachSample(InspectedText):
    """As a decoder does whose layers with state are of a class that is not known here."""

    def _find_row_ranks(self) -> None:
        return None


BY_ITSELF = Fault(text=TakesEachSample)


@pytest.mark.slow
def test_layers_that_take_each_sample_by_itself_are_called_alike(made: dict[str, Made]) -> None:  # noqa: F811
    model = made["qwen3_5"]
    steps = rows_of_unlike_runs(model.folder)
    rows = make_sharder(model.folder, ROWS).shard(_slotted(0, ROWS, steps[0])).work["text"][0]
    assert [len(set(row.lengths)) for row in rows] == [1, 2] and [row.segment_calls for row in rows] == [2, 2]
    check(model, ROWS, steps, BY_ITSELF)
    check(model, ROWS, steps)


def test_without_even_calls_of_such_layers_it_is_seen(
    made: dict[str, Made],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made["qwen3_5"]
    monkeypatch.setattr(shard, "_count_runs", lambda lengths: 0)
    monkeypatch.setattr(ranks, "AGREE_S", 5)
    with pytest.raises(RuntimeError, match="different collectives|did not make that call"):
        check(model, ROWS, rows_of_unlike_runs(model.folder), BY_ITSELF)
