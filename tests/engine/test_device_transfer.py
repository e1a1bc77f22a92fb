"""What goes to the device, and what is there already."""

from __future__ import annotations

import torch

from dhp.engine.device_transfer import move_together, to_device


def test_a_tensor_of_the_device_is_used_where_it_lies() -> None:
    """cuda_ipc hands over tensors of the GPU itself, which cannot be locked for a transfer."""
    there = torch.empty(3, device="meta")  # no more of host memory than a GPU's
    assert to_device(there, torch.device("meta")) is there


def test_numbers_with_fractions_keep_them() -> None:
    """Positions by seconds are no whole numbers."""
    given = [torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([[0.5], [-12.25]]), torch.tensor([True, False])]
    moved = move_together(given, torch.device("cpu"))
    assert [(m.tolist(), m.dtype) for m in moved] == [
        ([[1, 2]], torch.int64), ([[0.5], [-12.25]], torch.float32), ([1, 0], torch.int64),
    ]  # fmt: skip
    assert all(m.data_ptr() != g.data_ptr() for m, g in zip(moved, given, strict=True))
