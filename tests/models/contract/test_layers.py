"""Which modules of a family's layers are found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dhp.models.contract.contract import find_structure, without_weights
from dhp.models.contract.find import _matrices, experts_of, find_text_parts, find_vision_parts
from tests.helpers.tiny_families import FAMILIES, make_config


@pytest.mark.parametrize("name", FAMILIES)
def test_each_layer_has_some_of_each(name: str) -> None:
    config = make_config(name)
    model = without_weights(config)
    structure = find_structure(model)
    for parts in (
        find_text_parts(model, structure, config.get_text_config()),
        find_vision_parts(model, structure),
    ):
        layers = list(model.get_submodule(parts.path).children())
        assert len(parts.kinds) == len(layers)
        for layer in layers:
            inside = dict(layer.named_modules()).keys()
            assert inside & set(parts.projections) and inside & set(parts.mlp)
            assert not any("down_proj" in name or "fc2" in name for name in parts.mlp)


def test_layers_of_one_kind_do_the_same_work() -> None:
    config = make_config("qwen3_5_moe")
    model = without_weights(config)
    parts = find_text_parts(model, find_structure(model), config.get_text_config())
    assert parts.kinds == ("linear_attention with experts",) * 3 + ("full_attention with experts",)
    assert {"linear_attn.in_proj_qkv", "self_attn.q_proj"} <= set(parts.projections)
    assert "mlp.experts" in parts.mlp
    assert experts_of(parts, model) == tuple(f"model.language_model.layers.{n}.mlp.experts" for n in range(4))


def test_layers_that_have_no_such_modules_keep_nothing() -> None:
    with torch.device("meta"):
        some = nn.ModuleDict({"self_attn": nn.ModuleDict({"q": nn.Linear(2, 2)})})
    assert _matrices([some, nn.ModuleDict({"conv": nn.Identity()})]) == ((), ())
