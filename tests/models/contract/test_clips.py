"""Sound of families without code of their own: what the library's processor makes of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dhp.core.batch import SOUND, VIDEO
from dhp.core.errors import DataError
from dhp.data.media.sound import read_sound
from dhp.data.media.sources import Sound
from dhp.data.read.records import Record, Turn
from dhp.doctor.plain_model import model_inputs
from dhp.models.registry import load_family
from tests.helpers.tiny_omni import RATE, make_wave, save_wave
from tests.helpers.tiny_sounds import HEARING, save_hearing
from tests.helpers.tiny_videos import preprocessor, save_tiny, write_still

PARTS = ("vision", "audio")


@pytest.fixture(scope="module", params=HEARING)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    folder = tmp_path_factory.mktemp("sounds") / request.param
    library = save_hearing(request.param, folder)
    write_still(folder / "still.png")
    for number, seconds in enumerate((0.7, 1.53)):
        save_wave(folder / f"{number}.wav", make_wave(seconds, number))
    return request.param, folder, library


def record(folder: Path) -> Record:
    first, second = (Sound(folder / f"{number}.wav") for number in range(2))
    asked = (first, folder / "still.png", "Which of ", second, " is it?")
    return Record("set", 1, "line 1", (Turn("user", asked), Turn("assistant", ("A tone.",))))


def wanted(name: str, folder: Path, library: Any) -> Any:
    say = lambda text: {"type": "text", "text": text}
    shown = [{"type": "audio"}, {"type": "image"}, say("Which of "), {"type": "audio"}, say(" is it?")]
    turns = [{"role": "user", "content": shown}, {"role": "assistant", "content": [say("A tone.")]}]
    text = preprocessor(folder, PARTS)._tokenizer.apply_chat_template(turns, tokenize=False)
    picture = Image.open(folder / "still.png").convert("RGB")
    waves = [read_sound(folder / f"{number}.wav", RATE) for number in range(2)]
    return library(
        text=text, images=[[picture]] if name == "gemma4" else [picture], audio=waves, add_special_tokens=False,
        return_tensors="pt", padding=True,
    )  # fmt: skip


def valid(name: str, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Frames of each clip, [frames, bins]."""
    features = inputs["input_features"] if name == "gemma4" else inputs["input_features"].transpose(1, 2)
    mask = inputs["input_features_mask" if name == "gemma4" else "feature_attention_mask"].bool()
    return [one[own] for one, own in zip(features, mask, strict=True)]


def test_tokens_and_features_are_those_of_the_familys_processor(made: tuple[str, Path, Any]) -> None:
    name, folder, library = made
    sample, theirs = preprocessor(folder, PARTS)(record(folder)), wanted(name, folder, library)
    assert sample.input_ids.tolist() == theirs["input_ids"][0].tolist()
    family = load_family(str(folder))
    kinds = sample.mm_token_type_ids
    assert np.array_equal(kinds == SOUND, sample.input_ids == family.config.audio_token_id)
    assert (kinds == SOUND).sum() == sum(form.tokens for form in sample.clip_forms) > 0 and VIDEO not in kinds
    for found, own in zip(sample.clips, valid(name, theirs), strict=True):
        assert found.shape == own.shape
        assert torch.allclose(torch.from_numpy(found), own, atol=1e-5)


def test_lengths_come_from_headers(made: tuple[str, Path, Any]) -> None:
    _, folder, _ = made
    preprocess = preprocessor(folder, PARTS)
    sample, length = preprocess(record(folder)), preprocess.measure(record(folder))
    assert length.text == len(sample.input_ids) and length.sound == int((sample.mm_token_type_ids == SOUND).sum())


def test_the_plain_models_arguments_are_the_librarys(made: tuple[str, Path, Any]) -> None:
    """Of a sample as the plain model takes it, frames that are sound."""
    name, folder, library = made
    family, sample = load_family(str(folder)), preprocessor(folder, PARTS)(record(folder))
    from dhp.core.parameters import TrainingRules
    from dhp.doctor.plain_model import read_plain

    model = read_plain(str(folder), torch.float32, "cpu", TrainingRules())
    found = valid(name, model_inputs(sample, family, model))
    for one, own in zip(found, valid(name, wanted(name, folder, library)), strict=True):
        assert torch.allclose(one, own, atol=1e-5)


def test_a_clip_that_would_be_cut_is_refused(made: tuple[str, Path, Any], tmp_path: Path) -> None:
    _, folder, _ = made
    path = save_wave(tmp_path / "long.wav", make_wave(31, 0))
    turns = (Turn("user", (Sound(path), "What?")), Turn("assistant", ("A tone.",)))
    with pytest.raises(DataError, match=r"long.wav is 31.0 s long, and of more than [23]0.0 s .* drops the rest"):
        preprocessor(folder, PARTS)(Record("set", 1, "line 1", turns))


def test_sound_of_a_tower_that_is_not_read_is_refused(tmp_path: Path) -> None:
    folder = save_tiny("internvl", tmp_path / "model")
    path = save_wave(tmp_path / "short.wav", make_wave(1, 0))
    turns = (Turn("user", (Sound(path), "What?")), Turn("assistant", ("A tone.",)))
    with pytest.raises(DataError, match="short.wav, but the model has no audio tower that is read here"):
        preprocessor(folder)(Record("set", 1, "line 1", turns))


def test_a_run_without_the_part_refuses_sound(made: tuple[str, Path, Any]) -> None:
    _, folder, _ = made
    with pytest.raises(DataError, match="audio.num_actors=0, so this run hears nothing"):
        preprocessor(folder)(record(folder))
