"""Parts of a model: what they load, what they refuse, and the behaviour of transformers that the split stands on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    LlavaConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    core_model_loading,
)

from dhp.core.errors import ModelError
from dhp.models import registry
from dhp.models.load import load_part
from dhp.models.registry import FAMILIES, load_family
from dhp.models.types import Chunk
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import save_model


def test_each_part_holds_its_own_weights_and_no_other(made_model: str) -> None:
    family = load_family(made_model)
    whole = dict(AutoModelForImageTextToText.from_pretrained(made_model).named_parameters())
    vision = dict(load_part(made_model, family.decoder.modules, torch.float32).named_parameters())
    text = dict(load_part(made_model, family.tower.modules, torch.float32).named_parameters())
    assert vision.keys() == {name for name in whole if name.startswith("model.visual.")}
    assert text.keys() == whole.keys() - vision.keys()
    for name, weight in (vision | text).items():
        assert torch.equal(weight, whole[name]), name


def test_parts_train_and_the_original_class_is_untouched(made_model: str) -> None:
    family = load_family(made_model)
    part = load_part(made_model, family.decoder.modules, torch.float32)
    assert part.training
    assert type(part) is not type(AutoModelForImageTextToText.from_pretrained(made_model))
    assert AutoModelForImageTextToText.from_pretrained(made_model).lm_head.weight is not None


def _sharded_names(model: str) -> dict[str, tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    part = load_part(model, load_family(model).tower.modules, torch.float32, mesh)
    whole = dict(AutoModelForImageTextToText.from_pretrained(model).named_parameters())
    for name, weight in part.named_parameters():
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        assert torch.equal(full, whole[name]), name
    return {n: tuple(p.to_local().shape) for n, p in part.named_parameters() if isinstance(p, DTensor)}


def test_tensor_ranks_read_their_own_slices(made_model: str) -> None:
    first, second = run_on_ranks(_sharded_names, 2, made_model)
    assert first == second
    assert first["lm_head.weight"] == (256, 64)  # of 512 × 64
    assert first["model.language_model.embed_tokens.weight"] == (256, 64)
    layer = "model.language_model.layers.0."
    assert first[layer + "self_attn.k_proj.weight"] == (16, 64)  # 2 of 4 heads of 8
    assert first[layer + "mlp.down_proj.weight"] == (64, 48)
    assert layer + "input_layernorm.weight" not in first


def _tied_gradient_error(model: str) -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    part = load_part(model, load_family(model).tower.modules, torch.float64, mesh)
    whole = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float64)
    ids = torch.arange(3, 20)[None]
    for one in (part, whole):
        logits = one(input_ids=ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").backward()
    wanted = whole.get_input_embeddings().weight.grad
    return float((part.get_input_embeddings().weight.grad.full_tensor() - wanted).norm() / wanted.norm())


def test_tied_embeddings_get_both_gradients(tmp_path: Path) -> None:
    tied = str(save_model(tmp_path / "tied", tied=True))
    assert max(run_on_ranks(_tied_gradient_error, 2, tied)) < 1e-12


def test_the_files_have_the_key_layout_of_the_hub(made_model: str) -> None:
    keys = load_file(Path(made_model) / "model.safetensors").keys()
    assert "visual.patch_embed.proj.weight" in keys
    assert "model.layers.0.self_attn.q_proj.weight" in keys


SECOND = Chunk(range(1, 2), first=False, last=True)


def _load_second_layer(folder: Path) -> PreTrainedModel:
    family = load_family(str(folder))
    return load_part(str(folder), (*family.tower.modules, *family.decoder.absent([SECOND])), torch.float32)


def _rewrite(model: str, folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    shutil.copytree(model, folder)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_slice_needs_no_weight_of_other_layers(made_model: str, tmp_path: Path) -> None:
    others = ("model.layers.0.", "model.embed_tokens.", "visual.")
    keep = lambda weights: {name: weight for name, weight in weights.items() if not name.startswith(others)}
    part = _load_second_layer(_rewrite(made_model, tmp_path / "half", keep))
    assert "model.language_model.layers.1.mlp.up_proj.weight" in dict(part.named_parameters())


def test_a_slice_refuses_a_missing_weight_of_its_own(made_model: str, tmp_path: Path) -> None:
    keep = lambda weights: {name: weight for name, weight in weights.items() if "layers.1.mlp.up" not in name}
    with pytest.raises(ModelError, match="missing keys: model.language_model.layers.1.mlp.up_proj.weight. "):
        _load_second_layer(_rewrite(made_model, tmp_path / "broken", keep))


def test_a_slice_refuses_an_unknown_weight_among_its_own(made_model: str, tmp_path: Path) -> None:
    add = lambda weights: weights | {f"model.layers.{n}.odd.weight": torch.ones(2) for n in (0, 1)}
    with pytest.raises(ModelError, match=r"unexpected keys: model.language_model.layers.1.odd.weight. "):
        _load_second_layer(_rewrite(made_model, tmp_path / "odd", add))


def test_a_slice_reads_only_what_it_holds(made_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    own = core_model_loading._materialize_copy
    monkeypatch.setattr(
        core_model_loading, "_materialize_copy", lambda given, *more: read.append(given) or own(given, *more)
    )
    part = _load_second_layer(Path(made_model))
    assert len(read) == len(list(part.named_parameters()))


@pytest.mark.parametrize(("drop", "part"), [("visual.merger", "vision"), ("model.norm", "text")])
def test_a_missing_weight_is_refused_by_name(made_model: str, tmp_path: Path, drop: str, part: str) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(made_model, folder)
    weights = load_file(folder / "model.safetensors")
    kept = {k: w for k, w in weights.items() if not k.startswith(drop)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    family = load_family(str(folder))
    dropped = family.decoder.modules if part == "vision" else family.tower.modules
    with pytest.raises(ModelError, match="missing keys: .*" + drop.rpartition(".")[2]):
        load_part(str(folder), dropped, torch.float32)


def test_weights_of_another_shape_are_refused(made_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(made_model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="mismatched keys: .*norm.weight"):
        load_part(str(folder), load_family(str(folder)).tower.modules, torch.float32)


@pytest.mark.parametrize(
    ("model_type", "told"),
    [
        ("bert", "'bert' is no vision-language model .* nearest by name is"),
        (
            "mllama",
            "'mllama': MllamaForConditionalGeneration.forward takes no mm_encoder_outputs.* nearest by name is lla",
        ),
    ],
)
def test_a_family_without_the_contract_is_refused_with_the_nearest_that_has_it(
    tmp_path: Path, model_type: str, told: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelError, match=told):
        load_family(str(tmp_path))


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"text_config": {"attention_dropout": 0.1}}, "attention_dropout=0.1 of Qwen2_5_VLTextConfig is not supported"),
    ],
)
def test_attention_that_sees_less_is_refused(tmp_path: Path, changes: dict, told: str) -> None:
    config = Qwen2_5_VLConfig(**changes)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=told):
        load_family(str(tmp_path))


PHI = {"model_type": "phi3", "resid_pdrop": 0.1, "pad_token_id": 0}
MIXTRAL = {"model_type": "mixtral", "router_jitter_noise": 0.1}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"text_config": PHI}, r"resid_pdrop=0\.1 of Phi3Config: its layers would draw random numbers .* Set it to 0"),
        ({"text_config": MIXTRAL}, r"router_jitter_noise=0\.1 of MixtralConfig: its layers would draw"),
        ({"vision_config": {"model_type": "clip_vision_model", "drop_path_rate": 0.2}}, r"drop_path_rate=0\.2 of CLIP"),
    ],
)
def test_layers_that_draw_random_numbers_are_refused(tmp_path: Path, changes: dict, told: str) -> None:
    """Of a family with an adapter of its own, whose layers nobody runs before."""
    LlavaConfig(**changes).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=told):
        load_family(str(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"text_config": {**PHI, "resid_pdrop": 0.0}},
        {"text_config": {**MIXTRAL, "router_jitter_noise": 0.0}},
        {"text_config": {"model_type": "llama", "classifier_dropout": 0.1, "drop_tokens": True}},  # of no layer
    ],
)
def test_layers_that_draw_none_are_not_refused(tmp_path: Path, changes: dict) -> None:
    LlavaConfig(**changes).save_pretrained(tmp_path)
    assert load_family(str(tmp_path)).decoder is not None


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_no_family_is_refused_as_its_library_has_it(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    registry._refuse_dropout(config)
    registry._refuse_chance(config)


def test_a_directory_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no usable model configuration: "):
        load_family(str(tmp_path))
    with pytest.raises(ModelError, match=r"no usable model configuration \(there is no such directory, so the hub was"):
        load_family(str(tmp_path / "nowhere"))
