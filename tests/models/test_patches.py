"""Patch embeddings as products equal the convolutions that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dhp.models.tower import project_as_product

CASES = [
    (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), bias=False), (5, 3, 2, 4, 4)),  # patches that arrive one by one
    (nn.Conv2d(3, 8, 4, 4), (2, 3, 12, 8)),  # whole images
    (nn.Conv2d(3, 8, (4, 2), (4, 2)), (2, 3, 8, 8)),
]


@pytest.mark.parametrize(("convolution", "shape"), CASES, ids=["one patch", "images", "oblong"])
def test_the_product_is_the_convolution_and_so_are_its_gradients(convolution: nn.Module, shape: tuple) -> None:
    convolution = convolution.double()
    pixels = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    found = []
    for _ in range(2):
        output = convolution(pixels)
        gradients = torch.autograd.grad((output * output.detach().cos()).sum(), [pixels, *convolution.parameters()])
        found.append((output.detach(), *gradients))
        project_as_product(convolution)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_names_and_parameters_stay() -> None:
    convolution = nn.Conv2d(3, 8, 4, 4)
    before = {name: id(p) for name, p in convolution.named_parameters()}
    project_as_product(convolution)
    assert {name: id(p) for name, p in convolution.named_parameters()} == before
    assert type(convolution) is nn.Conv2d


@pytest.mark.parametrize("more", [{"stride": 2}, {"padding": 1}, {"dilation": 2}])
def test_patches_that_overlap_or_leave_gaps_are_refused(more: dict) -> None:
    with pytest.raises(ValueError, match="its stride must be its kernel"):
        project_as_product(nn.Conv2d(3, 8, **({"kernel_size": 4, "stride": 4} | more)))
