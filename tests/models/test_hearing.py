"""A sample with sound is what the family's own processor makes of the conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dhp.batch.collate import Collator
from dhp.batch.encoder_shards import Split
from dhp.batch.reader import BatchReaderSettings, make_reader
from dhp.core.batch import SOUND
from dhp.core.errors import DataError, ModelError
from dhp.data.media.sources import Sound
from dhp.data.read.records import Record, Turn
from dhp.data.sample.preprocess import Preprocessor
from dhp.data.sample.sample import Sample
from dhp.data.sampling.sampler import BatchLayout
from dhp.doctor.trial import sound_inputs
from dhp.models.registry import load_family
from tests.helpers.tiny_omni import RATE, make_wave, save_omni, save_wave

SECONDS = (1.23, 0.4, 2.001)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, three clips and a picture."""
    folder = tmp_path_factory.mktemp("omni")
    save_omni(folder)
    for number, seconds in enumerate(SECONDS):
        save_wave(folder / f"{number}.wav", make_wave(seconds, number))
    pixels = np.random.default_rng(0).integers(0, 255, (24, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "a.png")
    (folder / "none.json").write_text('[{"conversations": []}]')
    return folder


@pytest.fixture(scope="module")
def library(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_omni(tmp_path_factory.mktemp("again"))


@pytest.fixture(scope="module")
def preprocess(folder: Path) -> Preprocessor:
    return of_run(folder, ("vision", "audio"))


def of_run(folder: Path, encoders: tuple[str, ...]) -> Preprocessor:
    from dhp.config.data import DataConfig, DatasetEntry

    registry = {"x": DatasetEntry(str(folder / "none.json"))}
    data = DataConfig(["x"], data_registry=registry, cache_dir=str(folder / "cache"))
    settings = BatchReaderSettings(str(folder), data, BatchLayout(1, 1, 1), dict.fromkeys(encoders, Split()), 0)
    return make_reader(settings)._source._preprocess


def record(folder: Path, *asked: str) -> Record:
    """asked: names of files, and text."""
    wrapped = {"wav": lambda path: Sound(path), "png": lambda path: path}
    parts = [wrapped[p[-3:]](folder / p) if p[-3:] in wrapped else p for p in asked]
    return Record("set", 1, "line 1", (Turn("user", tuple(parts)), Turn("assistant", ("A high tone.",))))


SHOWN = {"image": "<|vision_start|><|image_pad|><|vision_end|>", "audio": "<|audio_start|><|audio_pad|><|audio_end|>"}
CASES = {
    "one clip": ("0.wav", "What do you hear?"),
    "several clips of different lengths": ("1.wav", "What", "0.wav", "2.wav", "do you hear?"),
    "clips around a picture": ("2.wav", "a.png", "What?", "1.wav"),
    "a picture": ("a.png", "What?"),
    "text": ("What?",),
}


@pytest.mark.parametrize("asked", CASES.values(), ids=CASES)
def test_tokens_and_features_are_those_of_the_librarys_processor(
    asked: tuple[str, ...], folder: Path, library: Any, preprocess: Preprocessor
) -> None:
    sample = preprocess(record(folder, *asked))
    text = "".join(SHOWN["audio" if p.endswith("wav") else "image"] if p[-4:-3] == "." else p for p in asked)
    waves = [make_wave(SECONDS[int(p[0])], int(p[0]))[:, 0].astype(np.float32) / 2**15 for p in asked if "wav" in p]
    pictures = [Image.open(folder / p).convert("RGB") for p in asked if p.endswith("png")]
    wanted = library(
        text=(
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\nA high tone.<|im_end|>\n"
        ),
        images=pictures or None,
        audio=waves or None,
        sampling_rate=RATE,
        return_tensors="pt",
    )
    assert sample.input_ids.tolist() == wanted["input_ids"][0].tolist()
    found = sound_inputs(sample, torch.float32)
    assert found.keys() == ({"input_features", "feature_attention_mask"} if waves else set())
    for name, tensor in found.items():
        padded = wanted[name]
        inside = wanted["feature_attention_mask"].bool()
        if name == "input_features":  # which the library fills up with features of silence
            tensor, padded = (one.transpose(1, 2)[inside] for one in (tensor, padded))
        assert torch.equal(tensor, padded.to(tensor.dtype)), name
    assert [form.rows for form in sample.clip_forms] == [len(clip) for clip in sample.clips]
    kinds = sample.mm_token_type_ids
    assert (kinds == SOUND).sum() == sum(form.tokens for form in sample.clip_forms)
    assert sample.target_tokens > 0


@pytest.mark.parametrize("asked", CASES.values(), ids=CASES)
def test_lengths_come_from_headers(asked: tuple[str, ...], folder: Path, preprocess: Preprocessor) -> None:
    told = record(folder, *asked)
    sample, length = preprocess(told), preprocess.measure(told)
    seen = np.isin(sample.mm_token_type_ids, (1, 2)).sum()
    assert (length.text, length.vision) == (len(sample.input_ids), seen)
    assert length.sound == (sample.mm_token_type_ids == SOUND).sum()
    assert (length.patches, length.targets) == (sample.patches, sample.target_tokens)
    assert length.encoded_bytes == sum((folder / name).stat().st_size for name in asked if name[-4:-3] == ".")


def test_positions_are_the_models_own(folder: Path, preprocess: Preprocessor) -> None:
    """By the plain model, sample by sample, as its forward computes them."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder).model
    samples = [preprocess(record(folder, *CASES[name])) for name in ("clips around a picture", "one clip", "text")]
    family = load_family(str(folder))
    for sample in samples:
        found = Collator(family, 0, True).padded((sample,))["position_ids"]
        wanted = positions(model, sample)
        assert torch.equal(found.expand_as(wanted).float(), wanted)


def positions(model: Any, sample: Sample) -> torch.Tensor:
    ids = torch.from_numpy(sample.input_ids)[None]
    thw = torch.tensor(sample.grids) if sample.grids else None
    lengths = torch.tensor([len(clip) for clip in sample.clips]) if sample.clips else None
    return model.get_rope_index(ids, thw, None, torch.ones_like(ids), False, lengths, None)[0]


def test_a_run_without_the_part_hears_nothing(folder: Path) -> None:
    with pytest.raises(DataError, match=r"audio .*0\.wav, but audio\.num_actors=0, so this run hears nothing"):
        of_run(folder, ("vision",))(record(folder, "0.wav", "What?"))
    assert len(of_run(folder, ("vision",))(record(folder, "a.png", "What?")).pixels) == 1


def test_a_placeholder_in_the_text_is_refused(folder: Path, preprocess: Preprocessor) -> None:
    with pytest.raises(DataError, match="2 audio clip placeholder tokens for 1 audio clips"):
        preprocess(record(folder, "0.wav", "What is <|audio_pad|>?"))


def test_a_tag_without_sound_is_refused(folder: Path, preprocess: Preprocessor) -> None:
    for look in (preprocess, preprocess.measure):
        with pytest.raises(DataError, match="1 <audio> tags in the human turns, but 0 audios. Name them under 'audio'"):
            look(record(folder, "<audio>What?"))
    with pytest.raises(DataError, match=r"1 <audio> tags in the human turns, but audio\.num_actors=0"):
        of_run(folder, ("vision",))(record(folder, "<audio>What?"))


def test_a_clip_that_is_too_short_for_features(folder: Path, preprocess: Preprocessor) -> None:
    save_wave(folder / "9.wav", make_wave(0.01, 0))
    for look in (preprocess, preprocess.measure):
        with pytest.raises(DataError, match=r"9\.wav is 160 samples long at 16000 a second; the model's features need"):
            look(record(folder, "9.wav", "What?"))


def test_a_feature_extractor_of_another_model(folder: Path, tmp_path: Path) -> None:
    save_omni(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(file.read_text().replace('"feature_size": 16', '"feature_size": 80'))
    with pytest.raises(ModelError, match=r"makes 80 bins, but the audio tower reads num_mel_bins\(16\)"):
        load_family(str(tmp_path)).processor.hearing.load()
