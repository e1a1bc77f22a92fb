"""Adapters that a run begins with: peft's files, compared with what the configuration asks for."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from dhp.core.errors import ConfigError
from dhp.core.parameters import AdapterSettings, is_adapter
from dhp.models.begin_adapters import CONFIG, FILE, PREFIX, check_begin, weight_reader
from dhp.models.lora import add_adapters, find_targets
from dhp.models.registry import load_family

ASKED = AdapterSettings(3, 5.0, targets=("q_proj", "down_proj"))
DORA = replace(ASKED, dora=True, rslora=True)


def plain(model: str) -> Any:
    return AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()


def by_peft(model: str, asked: AdapterSettings, folder: Path) -> Path:
    """An adapter's directory that peft alone wrote, of random values."""
    where = r".*language_model.*(q_proj|down_proj)"
    settings = LoraConfig(
        r=asked.rank, lora_alpha=int(asked.alpha), target_modules=where, use_dora=asked.dora, use_rslora=asked.rslora
    )
    adapted = get_peft_model(plain(model), settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if is_adapter(name):
                weight.normal_(1.0 if "magnitude" in name else 0.0, 0.3)
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[ASKED, DORA], ids=["lora", "dora"])
def saved(request: pytest.FixtureRequest, made_model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    return request.param, by_peft(made_model, request.param, tmp_path_factory.mktemp("adapter") / "a")


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.arange(5, 25)[None]).logits
        return found


def check(model: str, adapters: Mapping[str, AdapterSettings], begin: Mapping[str, Path], named: str = "") -> None:
    folders = {part: str(folder) for part, folder in begin.items()}
    check_begin(plain(model), load_family(model).parts, adapters, folders, named or model)


def test_they_compute_what_pefts_model_does(saved: tuple, made_model: str) -> None:
    asked, folder = saved
    check(made_model, {"text": asked}, {"text": folder})
    ours, part = plain(made_model), load_family(made_model).parts["text"]
    add_adapters(ours, find_targets(ours, part, asked), asked, seed=0, begin=weight_reader(folder))
    theirs = PeftModel.from_pretrained(plain(made_model), folder).eval()
    assert torch.equal(logits(ours), logits(theirs))
    assert (logits(ours) - logits(plain(made_model))).abs().max() > 1e-2
    fresh = plain(made_model)
    add_adapters(fresh, find_targets(fresh, part, asked), asked, seed=0)
    assert torch.allclose(logits(fresh), logits(plain(made_model)), atol=1e-5)  # without them nothing is changed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 4}, r"text.lora.rank=4, and the adapter of .* has 3\. Set text.lora.rank=3"),
        ({"alpha": 6.0}, r"text.lora.alpha=6.0, and .* has 5.0"),
        ({"rslora": True}, r"text.lora.rslora=True, and .* has False"),
        ({"dora": True}, r"text.lora.dora=True, and .* has False"),
        (
            {"targets": ("q_proj",)},
            r"targets=\['q_proj'\] selects \d+ matrices, and .* has adapters of .* it has .*down_",
        ),
        ({"targets": ()}, r"targets=\[\] selects .*: it lacks model.language_model.*gate_proj"),
    ],
)
def test_other_adapters_are_refused_with_both_values(
    changes: dict[str, Any], message: str, made_model: str, tmp_path: Path
) -> None:
    folder = by_peft(made_model, ASKED, tmp_path / "a")
    with pytest.raises(ConfigError, match=message):
        check(made_model, {"text": replace(ASKED, **changes)}, {"text": folder})


def changed(folder: Path, tmp_path: Path, **settings: Any) -> Path:
    shutil.copytree(folder, tmp_path / "b")
    file = tmp_path / "b" / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return tmp_path / "b"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "is not of LoRA's adapters"),
        ({"modules_to_save": ["merger"]}, r"more than low-rank adapters .*modules_to_save=\['merger'\].*Merge it"),
        ({"bias": "all"}, "bias=all"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"base_model_name_or_path": "org/another"}, "was trained beside org/another, and the model is .*model"),
        ({"alpha_pattern": {"q_proj": 9}}, r"text.lora.alpha=5.0, and the adapter of .*q_proj .* has 9.0"),
    ],
)
def test_what_a_run_cannot_begin_with_is_refused(
    settings: dict[str, Any], message: str, made_model: str, tmp_path: Path
) -> None:
    folder = changed(by_peft(made_model, ASKED, tmp_path / "a"), tmp_path, **settings)
    with pytest.raises(ConfigError, match=message):
        check(made_model, {"text": ASKED}, {"text": folder})


def test_the_base_goes_by_its_weights(made_model: str, llava_model: str, tmp_path: Path) -> None:
    folder = by_peft(made_model, ASKED, tmp_path / "a")
    shutil.copytree(made_model, tmp_path / "moved")
    check(made_model, {"text": ASKED}, {"text": folder}, str(tmp_path / "moved"))
    with pytest.raises(ConfigError, match=f"beside {made_model}, and the model is {llava_model}"):
        check(made_model, {"text": ASKED}, {"text": folder}, llava_model)
    check(
        made_model,
        {"text": ASKED},
        {"text": changed(folder, tmp_path, base_model_name_or_path="hub/other")},
        "my/other",
    )


def test_adapters_of_another_part_are_not_lost(made_model: str, tmp_path: Path) -> None:
    folder = by_peft(made_model, ASKED, tmp_path / "a")
    tensors = load_file(folder / FILE)
    name = "model.visual.blocks.0.attn.proj"
    out, width = plain(made_model).get_submodule(name).weight.shape
    more = {f"{PREFIX}{name}.lora_A.weight": torch.ones(3, width), f"{PREFIX}{name}.lora_B.weight": torch.ones(out, 3)}
    save_file(tensors | more, folder / FILE)
    with pytest.raises(ConfigError, match=f"has adapters of {name} too .1 modules., which is none of text's"):
        check(made_model, {"text": ASKED}, {"text": folder})
    both = {"text": ASKED, "vision": replace(ASKED, targets=("blocks.0.attn.proj",))}
    check(made_model, both, {"text": folder, "vision": folder})


@pytest.mark.parametrize("lost", ["lora_A", "lora_B"])
def test_a_file_that_is_not_whole_is_refused(lost: str, made_model: str, tmp_path: Path) -> None:
    folder = by_peft(made_model, ASKED, tmp_path / "a")
    tensors = load_file(folder / FILE)
    name = next(name for name in tensors if lost in name)
    save_file({n: one for n, one in tensors.items() if n != name}, folder / FILE)
    message = "rank=3, and .* has 0" if lost == "lora_A" else r"has .*lora_B.* in the shape None, and it has \(\d+, 3\)"
    with pytest.raises(ConfigError, match=message):
        check(made_model, {"text": ASKED}, {"text": folder})


def test_a_folder_without_adapters_is_named_with_what_makes_one(made_model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="text.lora.begin_from=.* is no directory of adapters with .*dhp export RUN"):
        check(made_model, {"text": ASKED}, {"text": tmp_path})
    folder = by_peft(made_model, ASKED, tmp_path / "a")
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:100])
    with pytest.raises(ConfigError, match="is no directory of adapters"):
        check(made_model, {"text": ASKED}, {"text": folder})
