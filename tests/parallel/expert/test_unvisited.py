"""Experts that no token visits: every parameter has a gradient of zero, and outputs stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import Ernie4_5_VLMoeConfig
from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import Ernie4_5_VLMoeMoeBlock

from dhp.parallel.expert.expert_modules import OF_PICTURES, choose_product, let_all_take_part

TOKENS, HIDDEN = 6, 32


@pytest.fixture
def block() -> nn.Module:
    torch.manual_seed(0)
    text = {"hidden_size": HIDDEN, "moe_intermediate_size": [16, 16], "moe_num_experts": 4, "moe_k": 2}
    config = Ernie4_5_VLMoeConfig(text_config=text).text_config
    made = Ernie4_5_VLMoeMoeBlock(config)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.1)
    return made


def gradients(block: nn.Module, kinds: Tensor | None) -> tuple[Tensor, dict[str, Tensor | None]]:
    torch.manual_seed(1)
    output, _ = block(torch.randn(1, TOKENS, HIDDEN), kinds)
    output.square().sum().backward()
    found = {name: parameter.grad for name, parameter in block.named_parameters() if parameter.requires_grad}
    block.zero_grad()
    return output.detach(), found


NO_PICTURE = [None, torch.zeros(1, TOKENS, dtype=torch.int)]


@pytest.mark.parametrize("kinds", NO_PICTURE, ids=["unsaid", "text"])
def test_experts_of_pictures_have_gradients_without_pictures(block: nn.Module, kinds: Tensor | None) -> None:
    plain, before = gradients(block, kinds)
    lacking = {name for name, gradient in before.items() if gradient is None}
    assert lacking == {name for name in before if name.startswith(OF_PICTURES)} and lacking  # or this file is needless
    let_all_take_part(block)
    output, after = gradients(block, kinds)
    assert torch.equal(output, plain)
    for name, gradient in after.items():
        expected = before[name]
        assert gradient is not None
        assert torch.equal(gradient, torch.zeros_like(gradient) if expected is None else expected)


def test_experts_of_text_have_gradients_where_all_are_pictures(block: nn.Module) -> None:
    pictures = torch.ones(1, TOKENS, dtype=torch.int)
    plain, before = gradients(block, pictures)
    lacking = {name for name, gradient in before.items() if gradient is None}
    assert "text_moe.experts.gate_up_proj" in lacking
    let_all_take_part(block)
    output, after = gradients(block, pictures)
    assert torch.equal(output, plain)
    assert all(after[name] is not None and not after[name].any() for name in lacking)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_with_pictures_nothing_changes(block: nn.Module, dtype: torch.dtype) -> None:
    choose_product(block, dtype)
    kinds = torch.tensor([[0, 1, 1, 0, 0, 1]], dtype=torch.int)
    plain, before = gradients(block, kinds)
    let_all_take_part(block)
    output, after = gradients(block, kinds)
    assert torch.equal(output, plain)
    assert all(torch.equal(after[name], gradient) for name, gradient in before.items() if gradient is not None)
