"""Random numbers that a layer draws: of what is trained here, modules for dropout beside adapters draw some."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def device_of_draws(layer: nn.Module, device: torch.device | None = None) -> torch.device | None:
    """The device whose generator the layer draws from in training; None where it draws nothing. device: where the layer
    will be; where its parameters are, if None."""
    if any(isinstance(module, nn.Dropout) and module.p for module in layer.modules()):
        return device or next(layer.parameters()).device
    return None


def state_of_draws(device: torch.device | None) -> Tensor | None:
    """The state of the device's generator, on the host; None without a device."""
    if device is None:
        return None
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def go_on_from(state: Tensor | None, device: torch.device | None) -> None:
    """Let the device's generator go on from that state, if there is one."""
    if state is None or device is None:
        return
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
