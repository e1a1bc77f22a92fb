"""The audio tower as a part: rows are the plain tower's, whatever lies beside a clip; sizes, places and arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from dhp.config.schema import PartConfig
from dhp.core.errors import ConfigError
from dhp.models.audio import AUDIO_EMBEDDINGS, AudioTower
from dhp.models.contract.contract import find_structure, without_weights
from dhp.models.family import Family
from dhp.models.flops import NO_BACKWARD
from dhp.models.load import load_part
from dhp.models.processor import clip_forms
from dhp.models.registry import load_family
from dhp.models.tower import TowerInputs
from tests.helpers.tiny_families import make_config, save_family


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
