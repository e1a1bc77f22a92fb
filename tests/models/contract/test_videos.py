"""Videos whose frames go through a tower as pictures do: what the library's own processor makes of them."""

import json
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata

from dhp.batch.collate import pixels_by_argument
from dhp.core.errors import DataError
from dhp.data.media.frames import FrameSampling
from dhp.data.media.sources import Video
from dhp.data.media.video import map_frames
from dhp.data.sample.sample import Sample
from dhp.models.contract.find import find_contract
from dhp.models.processor_files import FILE, WHOLE
from dhp.models.registry import load_family
from dhp.tiny.looks import LOOKS
from dhp.tiny.tiny_families import SIDE
from tests.helpers.tiny_families import make_config
from tests.helpers.tiny_videos import (
    FRAMES,
    NAMES,
    library_processor,
    preprocessor,
    record,
    save_tiny,
    spelled_numbers,
    write_moving,
    write_still,
)

# Frames of a video of 40, 8 a second, that each model's settings ask for.
TAKEN = {
    "internvl": [3, 10, 16, 23, 30, 36],  # the middles of six parts
    "llava_onevision": [0, 4, 8, 12, 16, 20, 24, 28, 32, 36],  # two a second, as data.video_fps is
    "gemma4": [0, 8, 16, 24, 32],  # five
    "smolvlm": [0, 9, 19, 29, 39],  # one a second, to the last
}
RATE, TOTAL = 8, 40


@pytest.fixture(scope="module", params=NAMES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = save_tiny(request.param, tmp_path_factory.mktemp("videos") / request.param)
    write_moving(folder / "clip.mp4", TOTAL, RATE, (SIDE, SIDE))
    write_still(folder / "still.png")
    return request.param, folder


def wanted(name: str, folder: Path, still: bool, video_processor: Any = None) -> Any:
    """What the library's processor makes of an image, where there is one, and of the frames."""
    library, tokenizer = library_processor(name, folder, video_processor), preprocessor(folder)._tokenizer
    every, _ = map_frames(folder / "clip.mp4", FrameSampling(1e9, TOTAL, 1), lambda group: np.asarray(group[0]))
    about = VideoMetadata(TOTAL, float(RATE), duration=TOTAL / RATE, frames_indices=TAKEN[name])
    say = lambda text: {"type": "text", "text": text}
    shown = [*([{"type": "image"}] if still else []), say("What is in "), {"type": "video"}, say(" the video?")]
    turns = [{"role": "user", "content": shown}, {"role": "assistant", "content": [say("A red square.")]}]
    picture = Image.open(folder / "still.png").convert("RGB")
    return library(
        images=[[picture] if name in ("smolvlm", "gemma4") else picture] if still else None,
        text=tokenizer.apply_chat_template(turns, tokenize=False),
        videos=[np.stack([every[number] for number in TAKEN[name]])],
        videos_kwargs={"video_metadata": [about], "do_sample_frames": False, "return_metadata": True},
        text_kwargs={"add_special_tokens": False},
        return_tensors="pt",
    )


def read(folder: Path, still: bool) -> Sample:
    shown = (folder / "still.png",) if still else ()
    return preprocessor(folder)(record(*shown, "What is in ", Video(folder / "clip.mp4"), " the video?"))


def test_tokens_and_pixels_are_those_of_the_familys_processor(made: tuple[str, Path]) -> None:
    name, folder = made
    still = name != "smolvlm"  # its processor takes one or the other
    with spelled_numbers():
        sample, theirs = read(folder, still), wanted(name, folder, still)
        family = load_family(str(folder))
    assert sample.input_ids.tolist() == theirs["input_ids"][0].tolist()
    found = pixels_by_argument((sample,))
    moving = "pixel_values_videos" if "pixel_values_videos" in theirs else "pixel_values"
    assert found.keys() >= {moving} and len(found[moving].flatten()) >= len(TAKEN[name]) * SIDE * SIDE
    for argument, tensor in found.items():
        assert torch.allclose(tensor, torch.as_tensor(theirs[argument]).to(tensor.dtype), atol=1e-6), argument
    kinds = sample.mm_token_type_ids
    image, video = family.processor.image_token_id, family.processor.video_token_id
    assert np.array_equal(kinds == 1, sample.input_ids == image)
    assert np.array_equal(kinds == 2, sample.input_ids == video)
    assert (2 in kinds) == (name in ("llava_onevision", "gemma4"))
    assert sum(form.tokens for form in sample.grids) == (kinds > 0).sum()
    assert [seconds is None for seconds in sample.seconds] == [True] * still + [False]


def test_lengths_come_from_headers(made: tuple[str, Path]) -> None:
    _, folder = made
    with spelled_numbers():
        preprocess = preprocessor(folder)
        seen = record(folder / "still.png", "What is in ", Video(folder / "clip.mp4"), " the video?")
        sample, length = preprocess(seen), preprocess.measure(seen)
    assert (length.text, length.vision) == (len(sample.input_ids), int((sample.mm_token_type_ids > 0).sum()))
    assert length.pictures == 2
    layouts = [load_family(str(folder)).tower.image_layout(form) for form in sample.grids]
    assert length.patches == sum(patches for form in sample.grids for patches in preprocess._media.frame_patches(form))
    assert sum(layout.patches for layout in layouts) == sum(map(len, sample.pixels))


def test_a_run_may_ask_for_other_frames(made: tuple[str, Path]) -> None:
    """So does a row."""
    _, folder = made
    with spelled_numbers():
        taking = preprocessor(folder, video_fps=1.0, video_max_frames=3)._media.videos.taking
    assert (taking.fps, taking.max_frames, len(taking.indices(TOTAL, RATE))) == (1.0, 3, 3)


def test_a_run_takes_what_the_model_is_set_to(made: tuple[str, Path]) -> None:
    name, folder = made
    with spelled_numbers():
        taking = preprocessor(folder)._media.videos.taking
    assert taking.indices(TOTAL, float(RATE)).tolist() == TAKEN[name]


def test_another_order_of_frames_is_noticed(made: tuple[str, Path]) -> None:
    """Or the comparison above would compare nothing."""
    name, folder = made
    with spelled_numbers():
        sample, theirs = read(folder, still=False), wanted(name, folder, still=False)
    moving = "pixel_values_videos" if "pixel_values_videos" in theirs else "pixel_values"
    along = 1 if theirs[moving].ndim == 5 else 0
    assert not torch.allclose(pixels_by_argument((sample,))[moving], theirs[moving].flip(along), atol=1e-2)


@pytest.mark.parametrize("size", [(SIDE, SIDE), (56, 40)])
def test_transformers_own_video_processor_gives_the_same(
    made: tuple[str, Path], size: tuple[int, int], tmp_path: Path
) -> None:
    """Where frames are scaled, up to rounding: torchvision does it there and Pillow here."""
    pytest.importorskip("torchvision")
    name, folder = made
    kind = next(one for one in WHOLE if matches(one, name))
    own = getattr(import_module(f"transformers.models.{name}.video_processing_{name}"), kind)(**FRAMES[name])
    path = write_moving(tmp_path / "clip.mp4", TOTAL, RATE, size)
    every, _ = map_frames(path, FrameSampling(1e9, TOTAL, 1), lambda group: np.asarray(group[0]))
    about = VideoMetadata(TOTAL, float(RATE), duration=TOTAL / RATE)
    asked = {"llava_onevision": {"fps": 2.0}, "smolvlm": {"fps": 1, "num_frames": 8}}
    theirs = own(
        [np.stack(every)], video_metadata=[about], do_sample_frames=True, return_metadata=True, return_tensors="pt",
        **asked.get(name, {}),
    )  # fmt: skip
    assert list(theirs["video_metadata"][0].frames_indices) == TAKEN[name]
    with spelled_numbers():
        found = pixels_by_argument((preprocessor(folder)(record("What is in ", Video(path), " it?")),))
    for argument, tensor in found.items():
        one = theirs[argument] if argument in theirs else theirs["pixel_values_videos"][0]
        off = (tensor - torch.as_tensor(one).to(tensor.dtype)).abs()
        assert float(off.max()) < (1e-6 if size == (SIDE, SIDE) and name in ("internvl", "llava_onevision") else 0.05)
        assert float(off.double().mean()) < 1e-3, argument


def matches(kind: str, name: str) -> bool:
    return kind.lower().startswith(name.replace("_", ""))


@pytest.mark.parametrize("kind", ["InternVLVideoProcessor", "SmolVLMVideoProcessor", "Gemma4VideoProcessor"])
def test_each_rule_is_the_librarys(kind: str) -> None:
    pytest.importorskip("torchvision")
    name = next(one for one in NAMES if matches(kind, one))
    own = getattr(import_module(f"transformers.models.{name}.video_processing_{name}"), kind)()
    for rate, total in product((1, 5, 30), (2, 9, 300, 1000)):
        most = min(total, 8)
        about = VideoMetadata(total, float(rate), duration=total / rate)
        theirs = own.sample_frames(about, num_frames=most, **({"fps": 1} if name == "smolvlm" else {}))
        taking = FrameSampling(1.0 if name == "smolvlm" else 1e9, most, 1, rule=WHOLE[kind], least=1)
        assert taking.indices(total, float(rate)).tolist() == [int(index) for index in theirs], (rate, total)


def test_frames_without_the_ends_of_a_long_video() -> None:
    """Of 100 s, ten frames a second: a second at either end is left out where frames are taken so rarely."""
    taking = FrameSampling(1.0, 4, 1, rule="trimmed", least=1)
    assert taking.indices(1000, 10.0).tolist() == [10, 336, 663, 990]
    assert taking.indices(50, 10.0).tolist() == [0, 16, 32, 49]
    assert taking.indices(4, 10.0).tolist() == [0]


def test_a_model_without_a_video_processors_file_says_which(tmp_path: Path) -> None:
    folder = save_tiny("internvl", tmp_path / "model")
    path = write_moving(tmp_path / "clip.mp4", 8, 4)
    settings = (folder / FILE).read_text()
    (folder / FILE).unlink()
    with pytest.raises(DataError, match=rf"clip.mp4, but {folder} has no {FILE}.* Copy the model's own"):
        preprocessor(folder)(record(Video(path), "What?"))
    (folder / FILE).write_text(json.dumps(json.loads(settings) | {"video_processor_type": "OtherVideoProcessor"}))
    with pytest.raises(DataError, match="its video processor OtherVideoProcessor is not known here. Those that are"):
        preprocessor(folder)(record(Video(path), "What?"))


@pytest.mark.parametrize("name", ["llava_next", "idefics3"])
def test_a_model_whose_videos_are_no_frames_sees_images_only(name: str, tmp_path: Path) -> None:
    folder = save_tiny(name, tmp_path / "model")
    path = write_moving(tmp_path / "clip.mp4", 8, 4)
    with pytest.raises(DataError, match="this model sees images only"):
        preprocessor(folder)(record(Video(path), "What?"))


TOKENS = {"image_token": "<image>", "boi_token": "<begin>", "eoi_token": "<end>", "img_line_break_token": "<break>"}


@pytest.mark.parametrize("name", ["cohere2_vision", "mistral3"])
def test_pictures_of_families_that_need_torchvision_are_those_of_their_processors(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    named = {"named": TOKENS} if name == "cohere2_vision" else {}
    with patch.dict(LOOKS, {name: replace(LOOKS[name], **named, processor=LOOKS[name].processor or {})}):
        folder = save_tiny(name, tmp_path / "model")
    picture, preprocess = write_still(tmp_path / "still.png"), preprocessor(folder)
    sample = preprocess(record(picture, "What is in it?"))
    library = library_processor(name, folder, object())
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is in it?"}]}]
    turns += [{"role": "assistant", "content": [{"type": "text", "text": "A red square."}]}]
    theirs = library(
        images=[Image.open(picture).convert("RGB")],
        text=preprocess._tokenizer.apply_chat_template(turns, tokenize=False),
        text_kwargs={"add_special_tokens": False},
        return_tensors="pt",
    )
    assert sample.input_ids.tolist() == theirs["input_ids"][0].tolist()
    for argument, tensor in pixels_by_argument((sample,)).items():
        assert torch.equal(tensor, theirs[argument].to(tensor.dtype)), argument


def test_videos_with_a_tower_of_their_own_are_not_read() -> None:
    """Which runs with images alone would wear off."""
    contract = find_contract(make_config("video_llava"))
    assert contract.videos == () and any(name.startswith("model.video_tower.") for name in contract.unused)
    assert find_contract(make_config("llava_onevision")).videos == ("pixel_values_videos",)
