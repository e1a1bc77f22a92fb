"""MLPs in chunks of tokens: the same numbers, and in memory the inside of one chunk."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dhp.core.errors import ModelError
from dhp.parallel.recompute.recomputed_layers import tile_mlps
from dhp.parallel.recompute.saved_tensors import SavedTensors

WIDTH, INSIDE, TOKENS = 8, 64, 37


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down = nn.Linear(WIDTH, INSIDE), nn.Linear(INSIDE, WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        tokens = states.view(-1, WIDTH)  # as MLPs with experts take them, which a cut of padded rows must allow
        return self.down(torch.tanh(self.gate(tokens))).view(states.shape)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, states: Tensor) -> Tensor:
        return states + self.mlp(states)


def make(chunks: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer()).double()
    if chunks > 1:
        tile_mlps(list(model), ["mlp.gate"], chunks)
    return model


def step(model: nn.Module, states: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor, int, int]:
    """Output, gradients, gradient of the states, bytes kept between forward and backward, and the peak."""
    states, count = states.clone().requires_grad_(), SavedTensors(model)
    with count.counting():
        output = model(states)
        kept = count.bytes
        output.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return output.detach(), gradients, states.grad, kept, count.take_peak()


@pytest.mark.parametrize("chunks", [2, 5, TOKENS, TOKENS + 3])
def test_chunks_change_no_number(chunks: int) -> None:
    states = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
    whole, tiled = step(make(1), states), step(make(chunks), states)
    torch.testing.assert_close(tiled[0], whole[0])
    torch.testing.assert_close(tiled[1], whole[1])
    torch.testing.assert_close(tiled[2], whole[2])
    with torch.no_grad():
        torch.testing.assert_close(make(chunks)(states), whole[0])


def test_memory_holds_the_inside_of_one_chunk() -> None:
    """Kept: each layer's input. At the peak also the inside of one chunk, which is as long as it comes."""
    states = torch.randn(1, 1000, WIDTH, dtype=torch.float64)
    of_states, of_inside = states.nbytes, states.nbytes * INSIDE // WIDTH
    _, _, _, kept, peak = step(make(1), states)
    assert kept >= 2 * (of_states + of_inside)
    _, _, _, kept, peak = step(make(10), states)
    assert kept == 2 * of_states
    assert kept + of_states < peak <= kept + of_states + 2 * of_inside // 10  # the loss squares as many


def test_padded_rows_are_cut_by_tokens() -> None:
    states = torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(step(make(4), states)[:3], step(make(1), states)[:3])


def test_a_layer_without_an_mlp_of_its_own_is_refused() -> None:
    with pytest.raises(ModelError, match="mlp_chunks=2: in a Mlp gate lie in no MLP of their own"):
        tile_mlps([Mlp()], ["gate"], 2)
