"""A fused step with its scale equals scaling first and stepping then; nothing of it stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dhp.parallel.optim.base import clipped_step, step_for


def after(fused: bool, coefficients: list[float], ours: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4))]
    optimizer = torch.optim.AdamW(weights, lr=1.0, fused=fused)
    for step, coefficient in enumerate(coefficients):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
        if ours:
            clipped_step(optimizer, [w.grad for w in weights], 0.01 * (step + 1), coefficient)
            assert not hasattr(optimizer, "grad_scale")
            continue
        for weight in weights:
            weight.grad *= coefficient
        optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
        optimizer.step()
    return weights


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_scaled_and_the_rate_is_set(fused: bool) -> None:
    coefficients = [0.3, 1.0, 0.01]
    for found, wanted in zip(after(fused, coefficients, True), after(False, coefficients, False), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_an_optimizer_without_parameters_takes_no_step() -> None:
    weight = nn.Parameter(torch.ones(2))
    clipped_step(torch.optim.AdamW([weight], fused=True), [], 0.1, 0.5)
    assert weight.tolist() == [1.0, 1.0]


def test_counts_of_steps_lie_where_the_optimizer_looks_for_them() -> None:
    weight = nn.Parameter(torch.ones(2, device="meta"))
    step = torch.tensor(3.0)
    plain, fused = torch.optim.AdamW([weight]), torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=True)
    assert step_for(plain, weight, step).device.type == "cpu"
    assert step_for(fused, weight, step).device.type == "meta"
    copy = step_for(plain, weight, step)
    copy += 1  # as an optimizer does
    assert float(step) == 3.0
