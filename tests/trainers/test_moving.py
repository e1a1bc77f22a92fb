"""What goes to the device, and what is there already."""

from __future__ import annotations

import torch

from dhp.trainers.moving import to_device


def test_a_tensor_of_the_device_is_used_where_it_lies() -> None:
    """cuda_ipc hands over tensors of the GPU itself, which cannot be locked for a transfer."""
    there = torch.empty(3, device="meta")  # no more of host memory than a GPU's
    assert to_device(there, torch.device("meta")) is there
