"""Rounded copies in a module, masters for the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhp.parallel.optim.base import cast_parameters, exact_dtype, widen
from dhp.parallel.optim.replicated import Replicated
from tests.helpers.ranks import run_on_ranks


class Tied(nn.Module):
    """An embedding and a head of one weight, a frozen weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("frequencies", torch.randn(4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids) + self.frozen.to(self.embedding.weight))


def test_parameters_are_widened_where_they_are_and_shared_ones_stay_shared() -> None:
    module = Tied().to(torch.bfloat16)
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in module.named_parameters()}
    widen(module, torch.float32)
    for name, parameter in module.named_parameters():
        same, rounded = before[name]
        assert parameter is same and parameter.dtype == torch.float32 and torch.equal(parameter, rounded.float())
    assert module.head.weight is module.embedding.weight and module.frequencies.dtype == torch.bfloat16


def test_parameters_are_rounded_once_and_shared_ones_stay_shared() -> None:
    module = Tied()
    masters, buffer = dict(module.named_parameters()), module.frequencies
    cast_parameters(module, torch.bfloat16)
    found = dict(module.named_parameters())
    assert list(found) == list(masters)
    for name, master in masters.items():
        assert found[name] is not master and torch.equal(found[name], master.to(torch.bfloat16))
        assert found[name].requires_grad == master.requires_grad and master.dtype == torch.float32
    assert module.head.weight is module.embedding.weight
    assert module.frequencies is buffer and buffer.dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "exact"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_the_format_that_accumulates(dtype: torch.dtype, exact: torch.dtype) -> None:
    assert exact_dtype(dtype) == exact


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def _tied_steps() -> tuple[list[Tensor], Tensor, bool]:
    module = Tied()
    update = Replicated(module, make_sgd, dist.group.WORLD, torch.bfloat16)
    found = []
    for step in range(2):
        ids = torch.tensor([[1, 2, 5], [0, 4, 4]][step])
        update.backward(module(ids).float().square().sum(), last=True)
        found.append(update._gradients.local()[0].clone())
        update.norm_sq()
        update.step(1e-2, 1.0)
    tied = module.head.weight is module.embedding.weight
    return (
        found,
        update._masters[0].detach(),
        tied and torch.equal(module.head.weight, update._masters[0].to(torch.bfloat16)),
    )


def test_a_tied_weight_in_bfloat16_is_updated_by_both_of_its_uses() -> None:
    """Untied, the head would go on with the weight that it was loaded with."""
    ((gradients, master, tied),) = run_on_ranks(_tied_steps, 1)
    assert tied
    module = Tied()
    for step, found in enumerate(gradients):
        rounded = module.embedding.weight.detach().to(torch.bfloat16).requires_grad_()
        ids = torch.tensor([[1, 2, 5], [0, 4, 4]][step])
        states = rounded[ids] + module.frozen.to(torch.bfloat16)
        (states @ rounded.T).float().square().sum().backward()
        torch.testing.assert_close(found, rounded.grad.float(), rtol=2e-2, atol=2e-2)
        module.embedding.weight.data -= 1e-2 * found
    torch.testing.assert_close(master, module.embedding.weight.detach(), rtol=1e-6, atol=1e-7)
