"""Adapters that were trained in shards: merged they compute what peft computes with them, and peft loads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from dhp.checkpoint.shard_reader import read_shards
from dhp.core.axes import Degrees
from dhp.core.errors import ConfigError, ModelError
from dhp.core.parameters import AdapterSettings, is_adapter
from dhp.models.empty import adapt
from dhp.models.export import merge, save_adapter, save_whole
from dhp.models.registry import load_family
from tests.helpers.batches import mixed_step
from tests.helpers.layouts import Case, Running, make_reader
from tests.helpers.tiny_families import save_family

Adapters = dict[str, AdapterSettings]
BOTH = {"vision": AdapterSettings(2, 8.0), "text": AdapterSettings(3, 3.0, targets=("q_proj", "down_proj"))}
DORA = {"text": AdapterSettings(2, 2.0, dora=True, rslora=True)}
CASES = {
    "both parts": (BOTH, Case(Degrees(ulysses=2), Degrees(tensor=2), 2, "float32", lora=tuple(BOTH.items()))),
    "dora and the projector": (
        DORA,
        Case(Degrees(), Degrees(data=2), 2, "float32", lora=tuple(DORA.items()), trainable=("projector",)),
    ),
}


def trained(model: str, case: Case, folder: Path) -> dict[str, Tensor]:
    """Weights of a checkpoint after two steps."""
    feed = make_reader(model, case, [mixed_step()] * 2)
    with Running(model, case) as running:
        for step in range(2):
            running.step(feed.step(step))
        running.save(folder)
    return {name: tensor for part in ("vision", "text") for name, tensor in read_shards(folder / part).items()}


def plain(model: str | Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 25)[None]).logits


@pytest.fixture(scope="module", params=CASES)
def run(request: pytest.FixtureRequest, made_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    adapters, case = CASES[request.param]
    folder = tmp_path_factory.mktemp("run")
    yield made_model, adapters, trained(made_model, case, folder), folder


def test_a_checkpoint_has_what_was_trained_alone(run: tuple) -> None:
    _, adapters, weights, _ = run
    of_parts = {"vision": "visual", "text": "language_model"}
    for part in adapters:
        own = [name for name in weights if of_parts[part] in name]
        assert own and all(map(is_adapter, own))


def test_merged_it_is_what_peft_makes_of_the_exported_adapter(run: tuple) -> None:
    model, adapters, weights, folder = run
    save_whole(Path(model), merge(model, weights, adapters), folder / "merged")
    count = save_adapter(model, weights, adapters, folder / "adapter")
    merged, by_peft = plain(folder / "merged"), PeftModel.from_pretrained(plain(model), folder / "adapter").eval()
    assert count >= sum(map(is_adapter, weights))
    torch.testing.assert_close(logits(merged), logits(by_peft), rtol=1e-4, atol=1e-5)
    assert (logits(merged) - logits(plain(model))).abs().max() > 1e-3  # and something was learned
    theirs = dict(by_peft.merge_and_unload().named_parameters())
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-7)


def test_adapters_of_another_model_are_refused(run: tuple, llava_model: str) -> None:
    model, adapters, weights, _ = run
    name = next(name for name in weights if "lora_A" in name)
    with pytest.raises(ModelError, match="is not the model that these adapters were trained beside.*--base"):
        merge(model, weights | {name: weights[name][:, 1:]}, adapters)
    with pytest.raises(ModelError, match="and they lack"):
        merge(model, {n: w for n, w in weights.items() if n != name}, adapters)


def test_what_peft_would_read_otherwise_is_refused(tmp_path: Path) -> None:
    """Dense layers of some models with experts: their `gate_proj` would become the experts'."""
    model, asked = str(save_family("glm4v_moe", tmp_path / "model")), {"text": AdapterSettings(2, 2.0)}
    beside = plain(model)
    adapt(beside, load_family(model), asked, "cpu")
    weights = {n: torch.randn_like(p) for n, p in beside.named_parameters() if is_adapter(n)}
    with pytest.raises(ModelError, match="peft would not read these adapters of a glm4v_moe model.*without --adapter"):
        save_adapter(model, weights, asked, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merged, before = merge(model, weights, asked), dict(plain(model).named_parameters())
    moved = {name for name, weight in merged.items() if name in before and not torch.equal(weight, before[name])}
    assert len(moved) == len(weights) / 2 and "model.language_model.layers.0.mlp.gate_proj.weight" in moved


def test_what_peft_has_no_way_to_say_is_refused(made_model: str, tmp_path: Path) -> None:
    mixed = {"vision": AdapterSettings(2, 2.0, rslora=True), "text": AdapterSettings(2, 2.0)}
    with pytest.raises(ModelError, match="adapters of vision and text differ in dora or rslora.*without --adapter"):
        save_adapter(made_model, {}, mixed, tmp_path / "out")
    name = "model.language_model.layers.0.self_attn.q_proj.base_layer.weight"
    with pytest.raises(ModelError, match="q_proj.weight was trained beside the adapters.*without --adapter"):
        save_adapter(made_model, {name: torch.zeros(1)}, {"text": AdapterSettings(2, 2.0)}, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ModelError, match="is not empty"):
        save_adapter(made_model, {}, {}, tmp_path / "full")


def test_adapters_beside_four_bits_are_not_merged() -> None:
    rounded = AdapterSettings(2, 4.0, quantization="nf4")
    with pytest.raises(ConfigError, match=r"adapters of text were trained beside .*four bits.* --adapter"):
        merge("nowhere", {}, {"vision": AdapterSettings(2, 4.0), "text": rounded})


def test_a_merge_into_16_bits_is_rounded_once(llava_model: str, tmp_path: Path) -> None:
    model, asked = str(tmp_path), {"text": AdapterSettings(2, 2.0)}
    plain(llava_model).to(torch.bfloat16).save_pretrained(model)
    beside = plain(model)
    adapt(beside, load_family(model), asked, "cpu")
    weights = {n: torch.randn(p.shape) for n, p in beside.named_parameters() if is_adapter(n)}
    merged = merge(model, weights, asked)
    name = next(name for name in weights if "lora_A" in name)
    base, before = name.replace(".lora_A.default", ""), dict(plain(model).named_parameters())
    exact = before[base].double() + weights[name.replace("lora_A", "lora_B")].double() @ weights[name].double()
    assert merged[base].dtype == torch.bfloat16
    assert (merged[base] != exact.to(torch.bfloat16)).float().mean() < 1e-3  # ties of float32's own rounding
