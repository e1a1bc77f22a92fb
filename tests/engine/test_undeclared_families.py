"""Families that no adapter and no list knows: each layout that the doctor lets through equals the plain model."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from dhp.config.layout import resolve_part
from dhp.config.schema import PartConfig
from dhp.core.axes import Degrees
from dhp.core.errors import ConfigError, ModelError
from dhp.models.contract.double import staying_double
from dhp.models.contract.find import find_contract
from dhp.models.registry import load_family
from dhp.plan.model_checks import check_part, check_plan
from tests.engine.test_declared_families import FSDP, PICTURES_EVERYWHERE, Made, made, run, uneven_steps  # noqa: F401
from tests.helpers.alike import assert_exact
from tests.helpers.layouts import Case, compare
from tests.helpers.tiny_families import make_config
from tests.helpers.undeclared_families import UNDECLARED

ONE, TWO = Degrees(), Degrees(data=2)
LAYOUTS = {
    "data": Case(TWO, TWO, 2, packing=True),
    "data, padded": Case(TWO, TWO, 2),
    "sequence": Case(Degrees(ulysses=2), Degrees(ulysses=2), 2, packing=True),
    "shared images, tensor": Case(Degrees(ulysses=2), Degrees(tensor=2), 2, packing=True, recompute="light"),
    "pipeline": Case(ONE, ONE, 2, packing=True, stages=2, schedule="1f1b"),
    "shared images, recomputed": Case(Degrees(ulysses=2), ONE, 2, packing=True, recompute="all"),
    "FSDP2": FSDP,
}
# Why they are not trained.
REFUSED = {
    "blip-2": "asks for pixel_values in every call",
    "instructblip": "asks for pixel_values in every call",
    "instructblipvideo": "asks for pixel_values in every call",
    "chameleon": "makes tokens of the vocabulary",
    "apertus1p5": "makes tokens of the vocabulary",
    "emu3": "makes tokens of the vocabulary",
    "diffusion_gemma": "has no get_image_features",
    "granite4_vision": "no pooler_output or last_hidden_state",
    "llama4": "does not run",  # transformers 5.24 asks its decoder's output for pictures
    "fuyu": "without layers",
    "gemma4_unified": "without layers",
    "dots3_note": "layers differ in heads",
}
if find_spec("scipy") is None:
    REFUSED["inkling_mm_model"] = "No module named 'scipy'"
LOST = "shieldgemma2"  # whose weights the library does not read back
TRAINED = [name for name in UNDECLARED if name not in REFUSED and name != LOST]
# Layers that choose keys, and of another kind each; blocks over several images.
ALWAYS = (("mistral_large4", "shared images, tensor"), ("unlimited_ocr", "pipeline"), ("molmo2", "sequence"))


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_is_not_trained_says_why(name: str) -> None:
    with pytest.raises(ModelError, match=REFUSED[name]):
        find_contract(make_config(name))


def lets_through(folder: str, case: Case) -> bool:
    """Whether every check before a run does."""
    family = load_family(folder)
    for name, degrees in (("vision", case.vision), ("text", case.text)):
        kind = next((axis for axis in ("tensor", "ulysses", "data") if getattr(degrees, axis) > 1), "none")
        layout = {"ulysses": "sequence"}.get(kind, kind)
        layout = "pipeline" if name == "text" and case.stages > 1 else layout
        asked = PartConfig(folder, layout, 1 if layout == "none" else 2)
        try:
            check_part(name, resolve_part(name, asked), family)
            check_plan(name, resolve_part(name, asked), folder, family)
        except (ConfigError, ModelError):
            return False
    return True


def cases() -> Iterator[object]:
    for name in TRAINED:
        for layout in LAYOUTS:
            marks = () if (name, layout) in ALWAYS else (pytest.mark.families,)
            yield pytest.param(name, layout, marks=marks, id=f"{name}-{layout}")


@pytest.mark.parametrize(("name", "layout"), list(cases()))
def test_equals_the_plain_model_or_is_refused(name: str, layout: str, made: dict[str, Made]) -> None:  # noqa: F811
    case, model = LAYOUTS[layout], made[name]
    if not lets_through(model.folder, case):
        assert (name, layout) not in ALWAYS
        return
    with staying_double():
        steps = uneven_steps(model.folder, name in PICTURES_EVERYWHERE) if case is FSDP else model.steps
    assert_exact(run(Made(model.folder, steps), case))


# Pictures and heads that the library brings to other formats; norms among experts.
IN_16_BITS = ("nemotron_h_omni", "muse_spark")


@pytest.mark.parametrize(
    "name", [name if name in IN_16_BITS else pytest.param(name, marks=pytest.mark.families) for name in TRAINED]
)
def test_a_step_in_16_bits_is_near_the_plain_one(name: str, made: dict[str, Made]) -> None:  # noqa: F811
    """What is equal in float64 may still multiply numbers of two formats. The bound is rounding, not equality."""
    errors = compare(made[name].folder, Case(ONE, TWO, 1, "bfloat16", packing=True), made[name].steps)
    assert errors.loss < 0.05, errors
