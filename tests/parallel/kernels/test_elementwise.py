"""What of a layer is compiled, and what runs as it is."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from dhp.parallel.kernels.elementwise import compile_layers, eager


class Mixer(nn.Module):
    """Of a class that runs as it is; notes whether it does."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[bool] = []

    def forward(self, states: Tensor) -> Tensor:
        self.compiled.append(torch.compiler.is_compiling())
        return states * 2


class Layer(nn.Module):
    """A norm, attention that lengths are told, and a mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer, self.lengths = nn.LayerNorm(2), Mixer(), []
        self.attention = eager(self.attend)

    def attend(self, states: Tensor, length: int) -> Tensor:
        self.lengths.append(length)
        return states.flip(0)

    def forward(self, states: Tensor, length: int) -> Tensor:
        return self.mixer(self.attention(self.norm(states), length))


def test_lengths_and_mixers_stay_out_of_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    layer = Layer()
    names = [name for name, _ in layer.named_modules()]
    compile_layers([layer], {"Mixer"})
    for rows in (3, 4, 5, 6):
        states = torch.randn(rows, 2)
        torch.testing.assert_close(layer(states, rows), layer.norm(states).flip(0) * 2)
    assert layer.lengths == [3, 4, 5, 6] and layer.mixer.compiled == [False] * 4
    assert len(graphs) == 1, "rows of another length compiled anew"
    assert [name for name, _ in layer.named_modules()] == names
