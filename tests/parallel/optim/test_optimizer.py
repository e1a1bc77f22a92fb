"""AdamW and clipping against torch's own."""

import math

import pytest
import torch

from dhp.core.parameters import ParameterGroup
from dhp.parallel.optim.base import clip_coefficient, make_adamw

GROUP = ParameterGroup("text", 1e-3, 0.01, 0)


def test_adamw_is_torchs_own_with_one_group():
    model = torch.nn.Linear(3, 2)
    optimizer = make_adamw(model.named_parameters(), lambda _: GROUP, [0.9, 0.999], 1e-8)
    plain = torch.optim.AdamW(model.parameters(), fused=True)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults == plain.defaults
    (group,), (plain_group,) = optimizer.param_groups, plain.param_groups
    assert {key: group[key] for key in plain_group} == plain_group and group["group"] == GROUP


def test_a_slice_takes_the_same_steps_as_in_the_whole_whatever_the_threads():
    random = torch.Generator().manual_seed(0)
    whole, *gradients = torch.randn(4, 517, 13, generator=random)
    results = []
    for threads, rows in ((1, slice(None)), (2, slice(None)), (1, slice(3, 400))):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        weight = whole[rows].clone().requires_grad_()
        optimizer = make_adamw([("weight", weight)], lambda _: GROUP, [0.9, 0.999], 1e-8)
        for gradient in gradients:
            weight.grad = gradient[rows].clone()
            optimizer.step()
        torch.set_num_threads(before)
        results.append(weight.detach())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0][3:400], results[2])


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
def test_clipping_two_parts_equals_clipping_them_together(max_norm):
    torch.manual_seed(0)
    parts = [[torch.randn(4, 3, dtype=torch.float64), torch.randn(5, dtype=torch.float64)] for _ in range(2)]
    parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for part in parts for grad in part]
    for parameter, grad in zip(parameters, (grad for part in parts for grad in part)):
        parameter.grad = grad.clone()
    expected_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    norm, coefficient = clip_coefficient([sum(float(g.square().sum()) for g in part) for part in parts], max_norm)

    assert norm == pytest.approx(float(expected_norm), rel=1e-14)
    for parameter, grad in zip(parameters, (grad for part in parts for grad in part)):
        torch.testing.assert_close(parameter.grad, grad * coefficient, rtol=1e-14, atol=0)


@pytest.mark.parametrize("max_norm", [None, 0, 0.0])
def test_no_clipping(max_norm):
    assert clip_coefficient([9.0, 16.0], max_norm) == (5.0, 1.0)


def test_the_order_of_the_parts_does_not_change_the_norm():
    parts = [1e16, 1.0, 1.0, 3.0]
    assert clip_coefficient(parts, 1.0) == clip_coefficient(parts[::-1], 1.0)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_gradients_show_as_in_torch(broken):
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.tensor([broken], dtype=torch.float64)
    expected_norm = float(torch.nn.utils.clip_grad_norm_([parameter], 1.0))
    norm, coefficient = clip_coefficient([broken], 1.0)
    assert str(norm) == str(expected_norm)
    assert str(broken * coefficient) == str(parameter.grad.item())
