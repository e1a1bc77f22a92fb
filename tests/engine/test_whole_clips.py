"""Sound of families without code of their own, in layouts of three parts, beside the plain model."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dhp.core.axes import Degrees
from dhp.models.contract.double import staying_double
from tests.engine.test_audio import EXACTLY, exchange_clips
from tests.engine.test_declared_families import Made
from tests.helpers.alike import assert_exact
from tests.helpers.families import Maker
from tests.helpers.layouts import Case, Errors, Fault, compare
from tests.helpers.tiny_sounds import HEARING, save_hearing

ONE, TWO, SHARED = Degrees(), Degrees(data=2), Degrees(ulysses=2)
LAYOUTS = {
    "data": Case(TWO, TWO, 2, packing=True, audio=TWO),
    "shared": Case(SHARED, SHARED, 2, packing=True, audio=SHARED),
    "tensor, padded": Case(ONE, Degrees(tensor=2), 1, audio=SHARED),
    "ring": Case(ONE, Degrees(ring=2), 2, packing=True, audio=ONE),
    "pipeline": Case(ONE, ONE, 2, packing=True, audio=TWO, stages=2, schedule="1f1b"),
    "FSDP2": Case(ONE, TWO, 1, packing=True, audio=TWO, audio_zero_stage=3, text_zero_stage=3, fsdp=True),
}
WITHOUT = {("gemma4", "pipeline")}  # layers that need more than the states of the one before
ALWAYS = {("qwen2_5_omni", "shared"), ("gemma4", "data")}


@pytest.fixture(scope="session")
def heard(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    class Models(dict[str, Made]):
        def __missing__(self, name: str) -> Made:
            folder = tmp_path_factory.mktemp(name) / "model"
            save_hearing(name, folder)
            with staying_double():
                self[name] = Made(str(folder), Maker(str(folder)).heard_steps())
            return self[name]

    return Models()


def run(made: Made, case: Case, fault: Fault = EXACTLY) -> Errors:
    with staying_double():
        return compare(made.folder, case, made.steps, fault)


def cases() -> Iterator[Any]:
    for name in HEARING:
        for layout in LAYOUTS:
            if (name, layout) not in WITHOUT:
                marks = () if (name, layout) in ALWAYS else (pytest.mark.families,)
                yield pytest.param(name, layout, marks=marks, id=f"{name}-{layout}")


@pytest.mark.parametrize(("name", "layout"), list(cases()))
def test_equals_the_plain_model(name: str, layout: str, heard: dict[str, Made]) -> None:
    assert_exact(run(heard[name], LAYOUTS[layout]))


@pytest.mark.parametrize("name", HEARING)
def test_rows_of_exchanged_clips_show(name: str, heard: dict[str, Made]) -> None:
    errors = run(heard[name], Case(ONE, ONE, 1, packing=True, audio=ONE), replace(EXACTLY, edit=exchange_clips))
    assert errors.loss > 1e-6 and errors.gradient > 1e-3, errors
