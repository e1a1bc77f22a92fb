"""Every declared family in every layout that it has: sharded equals plain, over three optimizer steps.

An hour, so only on demand: `make test ARGS='-m families'`. What always runs of each family is one step of the trainers
of both parts beside the whole model (tests/doctor), and here one layout of some.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pytest

from dhp.config.layout import check_mlp_chunks, resolve_part
from dhp.config.schema import PartConfig
from dhp.core.axes import Degrees
from dhp.core.errors import ConfigError
from dhp.data.sample.sample import Sample
from dhp.doctor.diagnose import staying_double
from dhp.engine.stage_settings import StageSettings
from dhp.models.registry import load_family
from tests.engine.test_parity import assert_exact
from tests.helpers.families import Maker
from tests.helpers.layouts import Case, Errors, Fault, InspectedText, InspectedVision, compare
from tests.helpers.rows import slow, slow_but
from tests.helpers.tiny import make_sample
from tests.helpers.tiny_families import BEGIN, END, FAMILIES, IMAGE, VIDEO, save_family

VISION = {"none": Degrees(), "data": Degrees(data=2), "sequence": Degrees(ulysses=2)}
TEXT = {"none": Degrees(), "data": Degrees(data=2), "tensor": Degrees(tensor=2)}
# Layers that need more than the states of the one before: per-layer inputs, keys of other layers.
WITHOUT_PIPELINE = {"gemma4"}
# Some of whose weights no text-only sample touches, where plain AdamW passes them over and a step here decays them.
PICTURES_EVERYWHERE = {"ernie4_5_vl_moe"}


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
    if decoder.mixers or (decoder.block_rule and degrees.ring > 1) or name == "ovis2":
        with pytest.raises(ConfigError, match="carry state along the row|see each other both ways|without the other"):
            decoder.check(resolve_part("text", asked))
        return
    decoder.check(resolve_part("text", asked))
    assert_exact(run(made[name], Case(Degrees(), degrees, 2, packing=True)))


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
QUICK = [ALWAYS[3], ALWAYS[4]]


@pytest.mark.parametrize(("name", "case"), slow_but(ALWAYS, *QUICK), ids=[name for name, _ in ALWAYS])
def test_each_mechanism_equals_the_plain_model(name: str, case: Case, made: dict[str, Made]) -> None:
    assert_exact(run(made[name], case))


SHARDED = [
    "qwen3_5_moe",  # layers that carry state along the row, a router with experts and one beside them
    pytest.param("gemma3", marks=pytest.mark.families),
    pytest.param("glm4v_moe", marks=pytest.mark.families),
    pytest.param("qwen3_omni", marks=pytest.mark.families),
]


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_norms_equal_the_plain_model(name: str, made: dict[str, Made]) -> None:
    vision = Degrees(tensor=2) if load_family(made[name].folder).tower.divisible else Degrees()
    assert_exact(run(made[name], Case(vision, Degrees(tensor=2), 2, packing=True, sharded_norms=True)))
