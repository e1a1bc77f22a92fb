"""Which matrices get an adapter, and the facts about peft that adapters here stand on."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.pytorch_utils import Conv1D

from dhp.config.schema import PartConfig
from dhp.core.errors import ConfigError
from dhp.core.parameters import ADAPTER, AdapterSettings, is_adapter, plain_name
from dhp.models.load import drop_modules, model_class
from dhp.models.lora import TokenDropout, adapted_modules, add_adapters, check_targets, find_targets
from dhp.models.registry import load_family
from dhp.models.types import LayerParts, Part
from tests.helpers.tiny_families import make_config


def meta(model: str) -> nn.Module:
    with torch.device("meta"):
        return model_class(model)(AutoConfig.from_pretrained(model))


def targets(model: str, part: str, *said: str) -> tuple[str, ...]:
    return find_targets(meta(model), load_family(model).parts[part], AdapterSettings(2, 4.0, targets=said))


def test_by_default_all_linear_modules_of_the_layers(made_model: str) -> None:
    text = targets(made_model, "text")
    assert {name.rpartition(".")[2] for name in text} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert all(name.startswith("model.language_model.layers.") for name in text) and len(text) == 2 * 7
    vision = targets(made_model, "vision")
    assert {name.rpartition(".")[2] for name in vision} >= {"qkv", "proj"}
    assert not any("merger" in name or "patch_embed" in name for name in vision)


def test_routers_of_experts_get_none(qwen3_vl_moe_model: str) -> None:
    found = targets(qwen3_vl_moe_model, "text")
    assert found and not any("gate" == name.rpartition(".")[2] or "expert" in name for name in found)


def test_patterns_choose_within_the_part(made_model: str) -> None:
    assert targets(made_model, "text", "layers.1", "q_proj") == tuple(
        name for name in targets(made_model, "text") if ".1." in name or "q_proj" in name
    )
    assert targets(made_model, "vision", "merger.mlp.0") == ("model.visual.merger.mlp.0",)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Folders with the configuration of a declared family, without weights."""

    def save(name: str) -> str:
        folder, config = tmp_path_factory.mktemp(name), make_config(name)
        config.architectures = [AutoModelForImageTextToText._model_mapping[type(config)].__name__]
        config.save_pretrained(folder)
        return str(folder)

    return save


def test_what_a_router_is_made_of_gets_none(shapes: Callable[[str], str]) -> None:
    found = targets(shapes("gemma4_moe"), "text")
    assert any(name.endswith("q_proj") for name in found) and not any("router" in name for name in found)


def test_a_layer_that_nothing_depends_on_gets_none(llava_model: str) -> None:
    model, part = meta(llava_model), load_family(llava_model).parts["vision"]
    last = len(part.layers.kinds) - 1
    found = find_targets(model, part, AdapterSettings(2, 4.0))
    assert any(f"layers.{last - 1}." in name for name in found) and not any(f"layers.{last}." in name for name in found)
    assert all(parameter.requires_grad for parameter in model.parameters())
    told = rf"vision.lora.targets: layers.{last} selects .*layers.{last}.*an adapter there would learn nothing"
    with pytest.raises(ConfigError, match=told):
        check_targets(model, part, "vision.lora", AdapterSettings(2, 4.0, targets=(f"layers.{last}",)))


def test_a_tower_alone_of_a_model_whose_head_is_its_embedding(shapes: Callable[[str], str]) -> None:
    folder = shapes("gemma3")
    model, family = meta(folder), load_family(folder)
    drop_modules(model, family.outside("vision"))
    found = find_targets(model, family.parts["vision"], AdapterSettings(2, 4.0))
    add_adapters(model, found, AdapterSettings(2, 4.0), seed=0)
    assert tuple(name for name, _ in adapted_modules(model)) == found != ()


def test_dense_layers_beside_experts_keep_their_names(shapes: Callable[[str], str]) -> None:
    folder = shapes("glm4v_moe")
    model = meta(folder)
    found = [n for n in targets(folder, "text") if n.endswith(("mlp.gate_proj", "shared_experts.up_proj"))]
    assert len(found) == 1 + 2  # of the first layer, and of those with experts
    add_adapters(model, found, AdapterSettings(2, 4.0), seed=0)
    assert [name for name, _ in adapted_modules(model)] == found


class Convolved(Part):
    """A part whose layers are made as those of GPT-2."""

    modules, layers = ("h",), LayerParts("h", ("plain",) * 2, (), ())

    def check(self, asked: PartConfig) -> None:
        pass


def test_layers_without_a_linear_module_are_refused() -> None:
    model = nn.ModuleDict({"h": nn.ModuleList(nn.ModuleDict({"c_attn": Conv1D(6, 2)}) for _ in range(2))})
    assert find_targets(model, Convolved(), AdapterSettings(2, 4.0)) == ()
    told = r"text.lora.rank without text.lora.targets: .*have is c_attn \(Conv1D\)\. Set text.lora.rank=0"
    with pytest.raises(ConfigError, match=told):
        check_targets(model, Convolved(), "text.lora", AdapterSettings(2, 4.0))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("q_prj", r"text.lora.targets: q_prj is no matrix of this part; did you mean q_proj\?"),
        ("lm_head", r"lm_head selects lm_head, of the kind Linear: adapters stand beside linear layers alone"),
        ("embed_tokens", r"embed_tokens selects model.language_model.embed_tokens, of the kind Embedding"),
        ("*norm", r"of the kind Qwen2_5_VLRMSNorm"),
        ("merger", r"merger is no matrix of this part\. There are q_proj, k_proj"),
    ],
)
def test_what_cannot_have_an_adapter_is_refused(made_model: str, said: str, told: str) -> None:
    asked = AdapterSettings(2, 4.0, targets=("v_proj", said))
    with pytest.raises(ConfigError, match=told):
        check_targets(meta(made_model), load_family(made_model).parts["text"], "text.lora", asked)


@pytest.mark.parametrize("said", ["experts", "experts.down_proj", "mlp.gate"])
def test_experts_that_are_one_matrix_are_refused(said: str, shapes: Callable[[str], str]) -> None:
    folder = shapes("qwen3_vl_moe")
    asked = AdapterSettings(2, 4.0, targets=("q_proj", said))
    with pytest.raises(ConfigError, match=rf"{said} selects .*, of the kind Qwen3VLMoe.*: adapters stand beside"):
        check_targets(meta(folder), load_family(folder).parts["text"], "text.lora", asked)


def test_peft_keeps_the_module_with_its_attributes_and_adds_to_what_it_makes() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(3, 3)})
    base = model["a"]
    base.note = "kept"
    base.forward = lambda states: torch.ones(*states.shape[:-1], 3)  # as a slice's own forward is
    model["b"].weight.requires_grad_(False)
    add_adapters(model, ["a"], AdapterSettings(2, 6.0), seed=3)
    ((name, layer),) = adapted_modules(model)
    assert name == "a" and layer.base_layer is base and base.note == "kept"
    states = torch.randn(5, 4)
    assert torch.equal(layer(states), torch.ones(5, 3))  # B begins with zeros
    nn.init.ones_(layer.lora_B[ADAPTER].weight)
    added = 3.0 * states @ layer.lora_A[ADAPTER].weight.T @ layer.lora_B[ADAPTER].weight.T
    torch.testing.assert_close(layer(states), 1.0 + added)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert trained == {
        "a.base_layer.weight": True,
        "a.base_layer.bias": True,
        "a.lora_A.default.weight": True,
        "a.lora_B.default.weight": True,
        "b.weight": False,
        "b.bias": True,
    }
    assert [name for name in trained if is_adapter(name)] == ["a.lora_A.default.weight", "a.lora_B.default.weight"]
    assert plain_name("a.base_layer.weight") == "a.weight"


def test_adapters_of_a_second_part_are_no_second_adapter() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(3, 3)})
    with warnings.catch_warnings(action="error", category=UserWarning):  # peft would say so
        add_adapters(model, ["a"], AdapterSettings(2, 6.0, dropout=0.2), seed=0)
        add_adapters(model, ["b"], AdapterSettings(4, 6.0, dropout=0.4), seed=0)
    assert [layer.lora_dropout[ADAPTER].share for _, layer in adapted_modules(model)] == [0.2, 0.4]
    assert [(name, layer.r[ADAPTER]) for name, layer in adapted_modules(model)] == [("a", 2), ("b", 4)]


def test_dropout_is_of_what_enters_and_its_scale_of_the_root_with_rslora() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 3)})
    add_adapters(model, ["a"], AdapterSettings(4, 6.0, dropout=0.5, rslora=True), seed=0)
    ((_, layer),) = adapted_modules(model)
    assert isinstance(layer.lora_dropout[ADAPTER], TokenDropout) and layer.lora_dropout[ADAPTER].share == 0.5
    assert layer.scaling[ADAPTER] == 3.0


@pytest.mark.parametrize("part", ["vision", "text"])
def test_a_part_of_a_tied_model_gets_adapters_without_its_embedding(part: str, tied_model: str) -> None:
    """peft asks a model whose head is its embedding for that embedding."""
    family = load_family(tied_model)
    own, model = family.parts[part], meta(tied_model)
    drop_modules(model, (*family.outside(part), *([family.decoder.embedding] if part == "text" else ())))
    chosen = find_targets(model, own, AdapterSettings(2, 4.0))
    with torch.device("meta"):
        add_adapters(model, chosen, AdapterSettings(2, 4.0), seed=0)
    assert len(list(adapted_modules(model))) == len(chosen) > 0
    assert "get_input_embeddings" not in vars(model)
