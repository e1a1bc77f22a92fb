"""Videos whose frames go through a tower as pictures do, in layouts of all parts, beside the plain model.

Samples are read from files, as a run reads them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from dhp.core.axes import Degrees
from dhp.data.media.sources import Settings, Video
from dhp.data.sample.sample import Sample
from dhp.models.contract.double import staying_double
from tests.engine.test_declared_families import ExactText, ExactVision, Made, run
from tests.helpers.alike import assert_exact
from tests.helpers.families import Maker
from tests.helpers.layouts import Case, Fault, compare
from tests.helpers.tiny_families import make_config, save_weights
from tests.helpers.tiny_videos import NAMES, preprocessor, record, save_tiny, spelled_numbers, write_moving, write_still

ONE = Degrees()
LAYOUTS = {
    "data": Case(Degrees(data=2), Degrees(data=2), 2, packing=True),
    "shared": Case(Degrees(ulysses=2), Degrees(ulysses=2), 2, packing=True),
    "ring": Case(ONE, Degrees(ring=2), 2, packing=True),
    "tensor, padded": Case(Degrees(ulysses=2), Degrees(tensor=2), 1),
    "pipeline": Case(ONE, ONE, 2, packing=True, stages=2, schedule="1f1b"),
    "FSDP2": Case(Degrees(data=2), Degrees(data=2), 1, packing=True, zero_stage=3, text_zero_stage=3, fsdp=True),
}
WITHOUT = {("gemma4", "pipeline")}  # layers that need more than the states of the one before
ALWAYS = {("internvl", "shared"), ("llava_onevision", "tensor, padded"), ("gemma4", "data"), ("smolvlm", "pipeline")}


@pytest.fixture(scope="session")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Made]]:
    """Models by family, with steps of samples from files: a video, images and text; two videos beside an image; then a
    step with fewer videos than ranks."""

    class Models(dict[str, Made]):
        def __missing__(self, name: str) -> Made:
            folder = save_tiny(name, tmp_path_factory.mktemp(name) / "model")
            config = AutoConfig.from_pretrained(folder)
            config.text_config.pad_token_id = 0  # of which every tensor rank has the embedding
            save_weights(config, folder)  # such that each shows in the loss
            with spelled_numbers():
                self[name] = Made(str(folder), steps(folder))
            return self[name]

    return Models()


def steps(folder: Path) -> list[list[Sample]]:
    read = preprocessor(folder)
    short, long = write_moving(folder / "short.mp4", 12, 4, (28, 28)), write_moving(folder / "long.mp4", 30, 5)
    still = write_still(folder / "still.png")
    few = lambda path: Video(path, Settings(frames=3))
    text, image = record("What?"), record(still, "What is in it?")
    both = record(few(short), still, "What is in ", few(long), " the picture?")
    return [
        [read(one) for one in (record("What ", Video(short), " is it?"), image, text, both)],
        [read(one) for one in (text, text, record("Which one? ", few(long)), text)],
    ]


def cases() -> Iterator[Any]:
    for name in NAMES:
        for layout in LAYOUTS:
            if (name, layout) not in WITHOUT:
                marks = () if (name, layout) in ALWAYS else (pytest.mark.families,)
                yield pytest.param(name, layout, marks=marks, id=f"{name}-{layout}")


@pytest.mark.parametrize(("name", "layout"), list(cases()))
def test_videos_from_files_equal_the_plain_model(name: str, layout: str, read: dict[str, Made]) -> None:
    with spelled_numbers():
        assert_exact(run(read[name], LAYOUTS[layout]))


# Whose decoders see tokens of a frame both ways.
OTHERS = ("gemma4_vision",)


@pytest.fixture(scope="module", params=OTHERS)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    config = make_config("gemma4")
    config.text_config.use_bidirectional_attention = "vision"
    save_weights(config, folder)
    with staying_double():
        make = Maker(str(folder)).sample
        every = [[make([0], 3, 1, videos=[2]), make([1, 2], 4, 2), make([], 2, 3, videos=[3]), make([], 2, 4)]]
    return Made(str(folder), every)


@pytest.mark.parametrize("layout", ["data", "shared"])
def test_videos_that_enter_by_their_own_placeholders_equal_the_plain_model(layout: str, other: Made) -> None:
    assert_exact(run(other, LAYOUTS[layout]))


class FramesBackwards(ExactVision):
    """Frames of a video enter the tower in the wrong order."""

    def __init__(self, settings: Any):
        super().__init__(settings)
        whole = self.tower._encode_together

        def backwards(model: Any, pictures: Any, forms: Any) -> Any:
            turned = [{n: t.flip(1) if n == "pixel_values_videos" else t for n, t in one.items()} for one in pictures]
            return whole(model, turned, forms)

        self.tower._encode_together = backwards


def test_frames_in_the_wrong_order_are_noticed(read: dict[str, Made]) -> None:
    model = read["llava_onevision"]
    with staying_double():
        errors = compare(model.folder, LAYOUTS["data"], model.steps, Fault(FramesBackwards, ExactText))
    assert errors.gradient > 1e-6, errors
