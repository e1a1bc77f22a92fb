"""Layers through torch.compile, each by itself: its small operations become few kernels, for rows of any length."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn


def compile_layers(layers: Sequence[nn.Module], eager_classes: Collection[str]) -> None:
    """Compile the forward of each layer, at its first call. Names of modules and parameters stay.

    eager_classes: classes of modules inside, by name, that run as they are. Layers of one class share what is compiled.
    """
    for layer in layers:
        for module in layer.modules():
            if type(module).__name__ in eager_classes:
                module.forward = eager(module.forward)
        layer.forward = torch.compile(layer.forward, dynamic=True)


def compile_apart(function: FunctionType) -> Callable[..., Any]:
    """`function` compiled for one kind of call, as often as it is asked for. torch counts the graphs that it makes of
    a function by the function's code object and runs it as it is behind eight, so each kind gets a code object."""
    own = FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    return torch.compile(own, dynamic=True)


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, at which a compiled layer has a graph break: plans of segments differ from step to step."""
    return torch.compiler.disable(function)
