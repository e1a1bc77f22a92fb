"""The tower of sound and what it hears."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from dhp.batch.collate import Collator
from dhp.batch.encoder_shards import Split
from dhp.batch.reader import BatchReaderSettings, make_reader
from dhp.batch.shard import Division
from dhp.config.schema import PartConfig
from dhp.core.batch import SOUND
from dhp.core.errors import ConfigError, DataError, ModelError
from dhp.data.media.sources import Sound
from dhp.data.read.records import Record, Turn
from dhp.data.sample.preprocess import Preprocessor
from dhp.data.sample.sample import Sample
from dhp.data.sampling.sampler import BatchLayout
from dhp.doctor.plain_model import sound_inputs
from dhp.models.audio import AUDIO_EMBEDDINGS, AudioTower
from dhp.models.contract.contract import find_structure, without_weights
from dhp.models.family import Family
from dhp.models.flops import NO_BACKWARD
from dhp.models.load import load_part
from dhp.models.processor import clip_forms
from dhp.models.registry import load_family
from dhp.models.tower import TowerInputs
from tests.helpers.tiny_families import make_config, save_family
from tests.helpers.tiny_omni import RATE, make_wave, save_omni, save_wave


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return load_family(str(save_family("qwen3_omni", tmp_path_factory.mktemp("omni"))))


@pytest.fixture(scope="module")
def tower(family: Family) -> AudioTower:
    return family.parts["audio"]


@pytest.fixture(scope="module")
def model(family: Family) -> PreTrainedModel:
    folder = family.config.name_or_path
    return load_part(folder, family.outside("audio"), torch.float64)


def sounds(frames: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(count, 16, dtype=torch.float64, generator=generator) for count in frames]


def encode(tower: AudioTower, model: PreTrainedModel, clips: list[Tensor], forms: list) -> Tensor:
    with torch.no_grad():
        inputs = TowerInputs(torch.cat(clips), torch.empty(0), forms=forms, calls=tower.calls(forms))
        return tower.encode(model, inputs)[AUDIO_EMBEDDINGS]


@pytest.mark.parametrize("frames", [(50,), (30, 70), (150, 50), (250, 100, 8), (99, 1, 430)])
def test_rows_are_the_plain_towers(frames: tuple[int, ...], tower: AudioTower, model: PreTrainedModel) -> None:
    clips, forms = sounds(frames), clip_forms(frames, tower.config)
    with torch.no_grad():
        plain = model.model.audio_tower(torch.cat(clips).T, feature_lens=torch.tensor(frames)).last_hidden_state
    assert sum(form.tokens for form in forms) == len(plain)
    assert (encode(tower, model, clips, forms) - plain).abs().max() < 1e-12
    alone = torch.cat([encode(tower, model, [clip], [form]) for clip, form in zip(clips, forms)])
    assert (alone - plain).abs().max() < 1e-12  # on another rank than its sample's others
    beside = encode(tower, model, [*sounds((64, 300)), *clips], [*clip_forms((64, 300), tower.config), *forms])
    assert (beside[-len(plain) :] - plain).abs().max() < 1e-12  # in a call with other samples' clips


def test_a_short_chunk_alone_would_give_other_rows(tower: AudioTower, model: PreTrainedModel) -> None:
    """What the longest chunk of a sample is for."""
    _, clip = sounds((150, 50))
    inside, alone = clip_forms((150, 50), tower.config)[1], clip_forms((50,), tower.config)[0]
    rows = encode(tower, model, [clip], [inside]), encode(tower, model, [clip], [alone])
    assert (rows[0] - rows[1]).abs().max() > 1e-3


def test_convolutions_are_called_once_however_many_chunks_there_are(
    tower: AudioTower, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage 3 gathers their weights for each call, together with ranks that have fewer chunks."""
    frames = (430, 60)
    clips, forms, audio = sounds(frames), clip_forms(frames, tower.config), model.model.audio_tower
    monkeypatch.setattr(audio, "conv_chunksize", 2)
    calls: list[int] = []
    hook = audio.conv2d2.register_forward_hook(lambda *_: calls.append(1))
    try:
        parted = encode(tower, model, clips, forms)
        assert len(calls) > 1  # or there would be nothing to mend
        calls.clear()
        tower.call_modules_once(model)
        assert (encode(tower, model, clips, forms) - parted).abs().max() < 1e-12 and len(calls) == 1
    finally:
        hook.remove()


def test_modules_are_held_by_one_part_each(family: Family) -> None:
    assert family.outside("vision") == ("model.audio_tower", "model.language_model", "lm_head")
    assert family.outside("text") == ("model.visual", "model.audio_tower")
    silent = family.having(["vision", "text"])
    assert list(silent.parts) == ["vision", "text"] and silent.idle == ("model.audio_tower",)
    assert silent.outside("vision") == ("model.language_model", "lm_head")
    assert silent.outside("text") == ("model.visual", "model.audio_tower")
    assert silent.having(["vision", "text"]).idle == silent.idle


def test_layers_of_sound_are_not_taken_for_visions() -> None:
    """The published model has 32 of them and 27 of vision."""
    config = make_config("qwen3_omni")
    config.audio_config.encoder_layers = 5
    structure = find_structure(without_weights(config))
    assert (structure.vision_layers, structure.vision_depth) == ("model.visual.blocks", 3)
    assert (structure.vision, structure.audio) == (("model.visual",), ("model.audio_tower",))


@pytest.mark.parametrize("degree", ["tensor", "ring"])
def test_no_matrix_and_no_clip_is_cut(degree: str, tower: AudioTower) -> None:
    asked = PartConfig("m", "data", 2, data=1, ulysses=1, **({"ring": 1, "tensor": 1} | {degree: 2}))
    with pytest.raises(ConfigError, match=rf"audio\.{degree}=2 .* takes clips whole"):
        tower.check(asked)


@pytest.mark.parametrize("frames", [(400,), (200, 600)])
def test_arithmetic_is_what_the_tower_does(frames: tuple[int, ...], tower: AudioTower, model: PreTrainedModel) -> None:
    """Of whole chunks: of others the convolutions run over what fills them up."""
    forms = clip_forms(frames, tower.config)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # whose products are counted
        encode(tower, model, sounds(frames), forms)
    counted = tower.work.flops([tower.image_layout(form) for form in forms], NO_BACKWARD)
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_kernels_that_it_would_not_call_are_refused(tower: AudioTower) -> None:
    asked = PartConfig("m", "data", 2, data=2, ulysses=1, ring=1, tensor=1, attention_backend="flash_attention_2")
    with pytest.raises(ConfigError, match=r"audio\.attention_backend=flash_attention_2 with a qwen3_omni.*Set audio"):
        tower.check(asked)


@pytest.mark.parametrize("name", ["llava_clip", "llava_next"])
def test_so_they_are_of_towers_that_take_pictures_whole(name: str, tmp_path: Path) -> None:
    make_config(name).save_pretrained(tmp_path)
    asked = PartConfig(
        "m", "data", 2, pipeline=1, data=2, ulysses=1, ring=1, tensor=1, attention_backend="flash_attention_2"
    )
    with pytest.raises(ConfigError, match=r"vision\.attention_backend=flash_attention_2 with a llava.*Set vision"):
        load_family(str(tmp_path)).tower.check(asked)


def test_a_clip_has_one_layout(tower: AudioTower) -> None:
    (form,) = clip_forms((250,), tower.config)
    layout = tower.image_layout(form)
    assert (layout.patches, layout.window_lengths, layout.window_tokens) == (250, (250,), (form.tokens,))
    assert form.tokens == 13 + 13 + 7 and layout.form is form


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
    settings = BatchReaderSettings(
        str(folder), data, BatchLayout(1, 1, 1), Division(dict.fromkeys(encoders, Split())), 0
    )
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
