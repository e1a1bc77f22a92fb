"""What is found of a family by its twin, for configurations of the sizes that people train."""

from __future__ import annotations

import inspect

import pytest
from transformers import AutoModelForImageTextToText, LlavaConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from dhp.models.contract.contract import CONTRACT, WITHOUT_CONTRACT
from dhp.models.contract.find import find_contract
from tests.helpers.tiny_families import make_config


def test_unused_layers_are_those_of_the_whole_tower() -> None:
    """CLIP's last layer, whose states LLaVA passes over, though the twin's tower has four layers."""
    config = LlavaConfig()
    contract = find_contract(config)
    layers = config.vision_config.num_hidden_layers
    assert contract.structure.vision_depth == layers > 20
    last = f"model.vision_tower.encoder.layers.{layers - 1}."
    assert sum(name.startswith(last) for name in contract.unused) == 16
    others = {name for name in contract.unused if not name.startswith(last)}
    assert others == {"model.vision_tower.post_layernorm.weight", "model.vision_tower.post_layernorm.bias"}
    assert contract.dummy.tokens == (config.vision_config.image_size // config.vision_config.patch_size) ** 2


def test_what_is_handed_over_and_how() -> None:
    assert find_contract(make_config("qwen3_omni")).handover.more == (("deepstack_features", 2),)
    assert find_contract(make_config("ovis2")).handover.shared == (("visual_indicator_features", 5, 2),)
    assert find_contract(make_config("internvl")).handover.listed is False
    assert "model.image_newline" in find_contract(make_config("llava_next")).structure.vision


def test_styles_that_plans_leave_out() -> None:
    norms = {f"model.language_model.layers.*.self_attn.{p}_norm" for p in "qk"}
    assert set(find_contract(make_config("qwen3_omni")).tensor_plan or ()) == norms
    assert find_contract(make_config("internvl")).tensor_plan == {}
    assert find_contract(make_config("minicpmv4_6")).tensor_plan == {}


@pytest.mark.families
def test_families_without_the_contract_are_known_by_name() -> None:
    """Canary: whether another version of transformers gives one of them the contract, or takes it from one."""
    found = set()
    for kind, model in AutoModelForImageTextToText._model_mapping.items():
        if CONTRACT not in inspect.signature(model.forward).parameters:
            found.add(kind.model_type)
    assert found == WITHOUT_CONTRACT & set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
