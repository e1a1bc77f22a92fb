"""Gated MLPs that compute with zeros up to a wider width."""

import math

import pytest
import torch
from torch import nn

from dhp.core.reports import KernelUse
from dhp.parallel.kernels import padded
from dhp.parallel.kernels.padded import pad_gated_mlps

CPU = torch.device("cpu")


class Gated(nn.Module):
    def __init__(self, width: int, bias: bool = True, inner: int = 24) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(inner, width, bias), nn.Linear(inner, width, bias)
        self.down_proj, self.act_fn = nn.Linear(width, inner, bias), nn.SiLU()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(states)) * self.up_proj(states))


def outcome(module: nn.Module, states: torch.Tensor) -> list[torch.Tensor]:
    leaf = states.clone().requires_grad_()
    output = module(leaf)
    slopes = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad(output, [leaf, *module.parameters()], slopes)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [57, 3, 100])
def test_outputs_and_gradients_are_those_of_the_published_width(width: int, bias: bool) -> None:
    torch.manual_seed(width)
    module, states = Gated(width, bias).double(), torch.randn(2, 5, 24, dtype=torch.float64)
    plain, shapes = outcome(module, states), {name: p.shape for name, p in module.named_parameters()}
    assert pad_gated_mlps(module, CPU, torch.float64, {"mlp": "padded"}) == (KernelUse("mlp", "padded", 1),)
    wide: list[int] = []
    module.act_fn.register_forward_hook(lambda _, given, __: wide.append(given[0].shape[-1]))
    for ours, theirs in zip(outcome(module, states), plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-13, atol=1e-14)
    assert wide == [-(-width // 64) * 64]
    assert {name: p.shape for name, p in module.named_parameters()} == shapes


def test_layers_of_one_shape_have_weights_of_their_own_in_the_zeros_that_they_share() -> None:
    torch.manual_seed(1)
    module, states = nn.Sequential(*[Gated(57).double() for _ in range(3)]), torch.randn(2, 24, dtype=torch.float64)
    plain = outcome(module, states)
    pad_gated_mlps(module, CPU, torch.float64, {"mlp": "padded"})
    with torch.inference_mode():
        assert torch.allclose(module(states), plain[0])
    for ours, theirs in zip(outcome(module, states), plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-13, atol=1e-14)
    (*_, zeros) = vars(module[0].gate_proj)[padded._PADDING]
    assert zeros and all(int(wide.count_nonzero()) <= math.prod(shape) for (shape, *_), wide in zeros.items())


def test_a_cpu_pads_where_it_is_asked_alone_and_aligned_widths_stay() -> None:
    module = Gated(57)
    for wanted in ({}, {"mlp": "auto"}, {"mlp": "plain"}):
        assert pad_gated_mlps(module, CPU, torch.float32, wanted) == ()
    assert pad_gated_mlps(Gated(128), CPU, torch.float32, {"mlp": "padded"}) == ()


@pytest.mark.parametrize(
    ("width", "dtype", "padded"),
    [(3420, torch.bfloat16, True), (1710, torch.bfloat16, True), (3424, torch.bfloat16, False),
     (3456, torch.bfloat16, False), (3420, torch.float32, False), (57, torch.float32, True)],
)  # fmt: skip
def test_a_gpu_pads_rows_that_are_not_aligned(
    monkeypatch: pytest.MonkeyPatch, width: int, dtype: torch.dtype, padded: bool
) -> None:
    monkeypatch.setattr("dhp.parallel.kernels.padded._is_proved", lambda *_: True)
    assert bool(pad_gated_mlps(Gated(width, inner=2), torch.device("cuda"), dtype, {})) == padded


def test_only_what_is_proved_is_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert padded._is_proved(CPU, torch.bfloat16) and padded._is_proved(CPU, torch.float64)
    monkeypatch.setattr(padded, "is_proved", lambda *_: False)
    assert pad_gated_mlps(Gated(57), CPU, torch.float32, {"mlp": "padded"}) == ()


def test_frozen_weights_get_no_gradient() -> None:
    module = Gated(57).requires_grad_(False)
    pad_gated_mlps(module, CPU, torch.float32, {"mlp": "padded"})
    states = torch.randn(3, 24, requires_grad=True)
    module(states).sum().backward()
    assert states.grad is not None and all(p.grad is None for p in module.parameters())
