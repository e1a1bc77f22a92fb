"""Learned positions of patches, interpolated from a square table by their places in frames of any size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
