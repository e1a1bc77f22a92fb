"""Patch embeddings as matrix products.

A convolution whose stride is its kernel takes each patch by itself, which is a matrix product. Libraries of
convolutions are slow at it: in 16 bits they lack kernels for some shapes, and take seconds for others where the product
takes microseconds. The module, its parameters and their names stay; only its forward changes.
"""

from __future__ import annotations

from math import prod

import torch.nn.functional as F
from torch import Tensor, nn


def project_as_product(convolution: nn.Conv2d | nn.Conv3d) -> None:
    """Let `convolution` compute [images, channels, *sizes] → [images, outputs, *patches along each] as a product.

    Raises ValueError for one whose patches overlap, leave gaps or are padded.
    """
    kernel = tuple(convolution.kernel_size)
    plain = tuple(convolution.stride) == kernel and convolution.groups == 1
    if not plain or any(d != 1 for d in convolution.dilation) or any(p != 0 for p in convolution.padding):
        raise ValueError(f"{convolution} takes no patches one beside another: its stride must be its kernel")

    def forward(pixels: Tensor) -> Tensor:
        rows, counts = _patches(pixels, kernel)
        projected = F.linear(rows, convolution.weight.flatten(1), convolution.bias)
        return projected.movedim(-1, 1).reshape(len(pixels), -1, *counts)

    convolution.forward = forward


def project_as_products(model: nn.Module) -> None:
    """Apply `project_as_product` to all convolutions of `model` whose stride is their kernel."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            try:
                project_as_product(module)
            except ValueError:
                pass  # a convolution of another kind stays one


def _patches(pixels: Tensor, kernel: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """[images, channels, *sizes] as [images, patches, channels × kernel], and the number of patches along each."""
    counts = tuple(size // length for size, length in zip(pixels.shape[2:], kernel, strict=True))
    if all(count == 1 for count in counts):
        return pixels.reshape(len(pixels), 1, -1), counts
    split = [n for pair in zip(counts, kernel, strict=True) for n in pair]
    tiles = pixels.reshape(*pixels.shape[:2], *split)  # [images, channels, count, length, count, length, …]
    dims = range(len(kernel))
    order = (0, *(2 + 2 * d for d in dims), 1, *(3 + 2 * d for d in dims))
    return tiles.permute(order).reshape(len(pixels), prod(counts), -1), counts
