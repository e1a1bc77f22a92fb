"""What a configuration says of experts, against the models themselves."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    Glm4MoeConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModel

from dhp.config.schema import PartConfig
from dhp.core.errors import ConfigError
from dhp.models.decoder import Decoder
from dhp.models.empty import part_shape
from dhp.models.registry import load_family
from dhp.models.types import find_experts

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL |= {"vocab_size": 64, "num_hidden_layers": 3}
DEEP = {"moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
DEEP |= {"first_k_dense_replace": 1, "n_shared_experts": 2}
EVERY_OTHER = {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
TEXTS = {
    "qwen3_moe": Qwen3MoeConfig(**{**SMALL, **EVERY_OTHER}, decoder_sparse_step=2),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "glm4_moe": Glm4MoeConfig(**SMALL, **DEEP),
    "deepseek_v3": DeepseekV3Config(**SMALL, **DEEP),
}


def _check(text: PreTrainedConfig) -> None:
    found = find_experts(text)
    with torch.device("meta"):
        layers = AutoModel.from_config(text).layers
    held = [getattr(layer.mlp, "experts", None) for layer in layers]
    assert found.sparse == tuple(experts is not None for experts in held)
    shapes = {tuple(experts.down_proj.shape) for experts in held if experts is not None}
    assert shapes == {(found.count, text.hidden_size, found.width)}
    shared = next(layer.mlp for layer, experts in zip(layers, held, strict=True) if experts is not None)
    assert found.shared == (shared.shared_experts.up_proj.out_features if hasattr(shared, "shared_experts") else 0)


@pytest.mark.parametrize("name", TEXTS)
def test_the_configuration_tells_which_layers_have_which_experts(name: str) -> None:
    _check(TEXTS[name])


def test_those_of_the_families(experts_model: str, qwen3_vl_moe_model: str) -> None:
    for directory in (experts_model, qwen3_vl_moe_model):
        _check(AutoConfig.from_pretrained(directory).get_text_config())
    decoder = load_family(qwen3_vl_moe_model).decoder
    assert decoder.layers.kinds == ("experts", "causal", "experts", "experts")
    assert decoder.shared == tuple(f"model.language_model.layers.{n}.mlp.experts" for n in (0, 2, 3))


def test_a_dense_decoder_has_none(llava_model: str) -> None:
    assert find_experts(Qwen3Config()) is None
    assert load_family(llava_model).decoder.shared == ()


def test_replicas_hold_their_share_and_all_else(experts_model: str) -> None:
    family = load_family(experts_model)
    whole, shared = (
        part_shape(experts_model, family.tower.modules, shared=family.decoder.shared, sharing=n) for n in (1, 2)
    )
    of_experts = 2 * 4 * 3 * 24 * 64  # layers, experts, matrices
    assert shared.total == whole.total == whole.per_rank
    assert shared.per_rank == whole.total - of_experts // 2
    assert shared.replicated == whole.total - of_experts


def _decoder(**text: object) -> Decoder:
    from transformers import LlavaConfig, Qwen3MoeConfig

    return Decoder(LlavaConfig(text_config=Qwen3MoeConfig(**{"num_experts": 4, "moe_intermediate_size": 24} | text)))


@pytest.mark.parametrize(
    ("text", "asked", "told"),
    [
        ({}, {"data": 2, "expert": 3}, r"4 experts among neighbours of text.data=2"),
        ({}, {"tensor": 16}, r"width\(24\) % tensor\(16\)"),
        ({}, {"tensor": 2, "zero_stage": 3}, "text.zero_stage=3 with text.tensor=2 of a decoder with experts"),
        ({}, {"tensor": 2, "parallelism": "autotp"}, "text.parallelism=autotp with text.tensor=2 of a decoder with"),
        ({"output_router_logits": True}, {"pipeline": 2}, "text.pipeline=2 of a decoder with a load-balancing loss"),
        ({"output_router_logits": True}, {"compile": True}, "text.compile=true of a decoder with a load-balancing"),
    ],
)
def test_what_is_refused_by_name(text: dict, asked: dict, told: str) -> None:
    degrees = {"data": 1, "tensor": 1, "pipeline": 1} | asked
    with pytest.raises(ConfigError, match=told):
        _decoder(num_attention_heads=32, num_key_value_heads=16, **text).check(PartConfig(**degrees))


def test_a_loss_without_a_weight_is_none() -> None:
    assert find_experts(_config(output_router_logits=True, router_aux_loss_coef=0.0)).balance == 0.0
    assert find_experts(_config(output_router_logits=False, router_aux_loss_coef=0.1)).balance == 0.0
    assert find_experts(_config(output_router_logits=True, router_aux_loss_coef=0.1)).balance == 0.1


def _config(**text: object) -> PreTrainedConfig:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**text)
