"""Patch embeddings as matrix products; learned positions of patches, interpolated.

A convolution whose stride is its kernel takes each patch by itself, which is a matrix product. Libraries of
convolutions are slow at it: in 16 bits they lack kernels for some shapes, and take seconds for others where the product
takes microseconds. The module, its parameters and their names stay; only its forward changes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dhp.core.batch import Grid


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


Kernel = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def interpolate(positions: Tensor, side: int, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """The entries of a table of side × side that surround each patch, and their weights; [patches, n] each.

    positions: row, column, rows, columns. kernel: places [patches, 2] and sizes [patches, 2] → entries along each axis
    and their weights, [patches, 2, √n] each.
    """
    entries, weights = kernel(positions[:, :2].float(), positions[:, 2:].clamp(min=1), side)
    flat = entries[:, 0, :, None] * side + entries[:, 1, None, :]
    return flat.flatten(1), (weights[:, 0, :, None] * weights[:, 1, None, :]).flatten(1)


def linear(places: Tensor, sizes: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Two entries along each axis. The corners of the table are those of the frame."""
    exact = places * (side - 1) / (sizes - 1).clamp(min=1)
    before = exact.floor()
    beyond = (exact - before)[..., None]  # [patches, 2, 1]
    near = before.long()[..., None]
    entries = torch.cat([near, near + 1], dim=-1).clamp(max=side - 1)
    return entries, torch.cat([1 - beyond, 1 - (beyond - 1).abs()], dim=-1)  # as transformers rounds them


def cubic(places: Tensor, sizes: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Four entries along each axis, weighed as by Keys 1981 ("Cubic convolution interpolation", a = -0.75). Patches and
    entries are squares, so that the edges of the table are those of the frame; beyond them its last entries go on."""
    exact = (places + 0.5) * side / sizes - 0.5
    before = exact.floor()
    offsets = torch.arange(-1, 3, device=places.device)
    distances = (exact[..., None] - before[..., None] - offsets).abs()
    a = -0.75
    near = ((a + 2) * distances - (a + 3)) * distances * distances + 1
    far = ((a * distances - 5 * a) * distances + 8 * a) * distances - 4 * a
    entries = (before.long()[..., None] + offsets).clamp(0, side - 1)
    return entries, torch.where(distances <= 1, near, far)


def put_together(pixels: np.ndarray, grid: Grid, merge: int, channels: int, frames: int, side: int) -> np.ndarray:
    """Pictures from patches in consecutive squares of merge × merge: float32 [t × frames, height, width, channels]."""
    t, h, w = grid
    rows = pixels.reshape(t, h // merge, w // merge, merge, merge, channels, frames, side, side)
    return rows.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(t * frames, h * side, w * side, channels)
