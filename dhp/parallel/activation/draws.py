"""Random numbers that a layer draws: for dropout of adapters, and where a model's configuration asks for some."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def device_of_draws(layer: nn.Module, device: torch.device | None = None) -> torch.device | None:
    """The device whose generator the layer draws from in training; None where it draws nothing. device: where the layer
    will be; where its parameters are, if None."""
    if any(map(_may_draw, layer.modules())):
        return device or next(layer.parameters()).device
    return None


def _may_draw(module: nn.Module) -> bool:
    """Whether it is one for dropout, or has a share to drop, as those have that call the function: `attention_dropout`,
    `drop_prob`."""
    drops = "drop" in type(module).__name__.lower()
    shares = (value for name, value in vars(module).items() if "drop" in name or (drops and name == "p"))
    return any(isinstance(share, (int, float)) and share > 0 for share in shares)


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
