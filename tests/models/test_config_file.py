"""config.json keeps the form of the source's; what is made here is read by transformers 4 and 5."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from dhp.core.torch_private import persistent_buffers
from dhp.models import config_file
from dhp.models.compose import compose
from dhp.models.config_file import change_positions, flat_rope, read_config, write_config
from dhp.models.export import save_whole
from dhp.tiny.tiny_model import make_family
from tests.helpers.transformers_4 import install, logits
from tests.models.test_compose import save_decoder, save_tower

FAMILIES = (
    "aya_vision", "gemma3", "glm4v", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "ovis2",
    "qwen2_5_vl", "qwen2_vl", "qwen3_vl",
)  # fmt: skip
NEW, OLD = {"rope_parameters", "dtype"}, {"rope_theta", "rope_scaling", "rope_local_base_freq", "torch_dtype"}


def without(content: Any, keys: set[str]) -> Any:
    if not isinstance(content, dict):
        return content
    kept = {key: value for key, value in content.items() if key not in keys}
    return {key: value if key in NEW else without(value, keys) for key, value in kept.items()}


def export(source: Path, out: Path) -> Path:
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    weights = {name: one.detach() for name, one in model.named_parameters()} | persistent_buffers(model)
    save_whole(source, weights, out)
    return out


def forms(name: str, folder: Path) -> dict[str, Path]:
    """One model: as published, its export, in version 5's form, and the export of that."""
    made = make_family(name, folder / "made")
    change_positions(made, rope_theta=1e6)  # as a stage of a curriculum
    content = read_config(made)
    if name == "gemma3":
        own = content["text_config"]["rope_parameters"]["full_attention"]
        own |= {"rope_type": "linear", "factor": 8.0}
        content["text_config"] |= flat_rope(content["text_config"]["rope_parameters"])
    found = {}
    for form, keys in (("published", NEW), ("new", OLD)):
        found[form] = Path(shutil.copytree(made, folder / form))
        (found[form] / "config.json").write_text(json.dumps(without(content, keys)))
        found[f"{form}_export"] = export(found[form], folder / f"{form}_export")
    return {"made": made, **found}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, dict[str, Tensor]]:
    """Logits by version and name/form."""
    four = install(request.config.cache.mkdir("models"))
    root = tmp_path_factory.mktemp("families")
    models = {f"{name}/{form}": path for name in FAMILIES for form, path in forms(name, root / name).items()}
    compose(save_tower("siglip", root / "tower"), save_decoder("qwen2", root / "decoder"), root / "composed")
    models["composed"] = root / "composed"
    del models["gemma3/made"]  # which has no scaling
    readable = {key: path for key, path in models.items() if not key.endswith("/new")}
    return {
        "5": dict(zip(models, logits("5", None, list(models.values())), strict=True)),
        "4": dict(zip(readable, logits("4", four, list(readable.values())), strict=True)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_is_the_same_model_in_both_versions(name: str, seen: dict[str, dict[str, Tensor]]) -> None:
    wanted = seen["5"][f"{name}/published"]
    for found in seen.values():
        forms = {key: one for key, one in found.items() if key.startswith(f"{name}/")}
        apart = {key: float((one - wanted).abs().max()) for key, one in forms.items()}
        assert len(apart) >= 3 and max(apart.values()) <= 1e-5 * float(wanted.abs().max()), apart


@pytest.mark.slow
def test_a_composed_model_is_the_same_in_both_versions(seen: dict[str, dict[str, Tensor]]) -> None:
    assert torch.allclose(seen["4"]["composed"], seen["5"]["composed"], atol=1e-5)


def test_a_published_file_is_exported_as_it_stands(tmp_path: Path) -> None:
    source = make_family("qwen2_5_vl", tmp_path / "made")
    content = without(read_config(source), NEW) | {"torch_dtype": "bfloat16", "of_their_own": [1]}
    content["text_config"]["rope_scaling"]["type"] = content["text_config"]["rope_scaling"].pop("rope_type")
    (source / "config.json").write_text(json.dumps(content))
    written = read_config(export(source, tmp_path / "out"))
    assert written == content | {"torch_dtype": "float32"} and list(written) == list(content)


def test_keys_of_version_4_that_would_change_the_model_here_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_family("llava", tmp_path / "made")
    content = without(read_config(source), OLD)
    monkeypatch.setattr(config_file, "flat_rope", lambda rope: {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    write_config(source, content)
    assert read_config(source) == content


@pytest.mark.parametrize(
    "rope, flat",
    [
        ({"rope_type": "default", "rope_theta": 5.0}, {"rope_theta": 5.0}),
        (
            {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 2]},
            {
                "rope_theta": 5.0,
                "partial_rotary_factor": 0.5,
                "rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]},
            },
        ),
        (
            {
                "full_attention": {"rope_type": "linear", "rope_theta": 5.0, "factor": 8.0},
                "sliding_attention": {"rope_theta": 2.0},
            },
            {"rope_theta": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 2.0},
        ),
        ({"rope_type": "proportional", "rope_theta": 5.0}, {"rope_theta": 5.0}),
        ({"full_attention": {"rope_theta": 5.0}, "chunked_attention": None}, {}),
    ],
)
def test_rotary_positions_in_keys_of_version_4(rope: dict[str, Any], flat: dict[str, Any]) -> None:
    assert flat_rope(rope) == flat
