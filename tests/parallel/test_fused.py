"""Fused kernels: put in where they are proved on the device, left out where they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm

from dhp.parallel import fused
from dhp.parallel.fused import fuse_elementwise
from tests.helpers.ranks import run_on_ranks

CPU = torch.device("cpu")


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config: Any = type("Config", (), {"hidden_size": 16, "intermediate_size": 24, "hidden_act": "silu"})()
        self.norm, self.mlp = Qwen2RMSNorm(16), Qwen2MLP(config)
        self.other = Gemma3RMSNorm(16)  # its weight is an offset from one
        self.norm.weight.data.normal_()
        self.other.weight.data.normal_()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.other(self.mlp(self.norm(states)))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replacements run on CPUs too; only nothing is gained there."""
    monkeypatch.setattr(fused, "_compiled_gate", lambda: lambda gate, up: F.silu(gate) * up)
    monkeypatch.setattr(fused, "_agree", lambda proved, *_: proved)
    own = fused._compare
    monkeypatch.setattr(fused, "_compare", lambda ours, plain, weights, _, dtype: own(ours, plain, weights, CPU, dtype))


def fuse(layer: nn.Module, dtype: torch.dtype) -> dict[str, int]:
    return fuse_elementwise(layer, torch.device("cuda"), dtype, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_proved_is_replaced_and_gives_the_same(dtype: torch.dtype, as_on_a_gpu: None) -> None:
    layer, states = _Layer(), torch.randn(5, 16)
    wanted = layer(states)
    grads = torch.autograd.grad(wanted.sum(), list(layer.parameters()))
    assert fuse(layer, dtype) == {"norm of Qwen2RMSNorm": 1, "gate of Qwen2MLP": 1}  # the other norm is none
    assert {p.dtype for p in layer.parameters()} == {torch.float32}  # the proof gives the weights back
    found = layer(states)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(torch.autograd.grad(found.sum(), list(layer.parameters())), grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_kernel_that_deviates_or_fails_is_left_out(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    layer = _Layer()
    monkeypatch.setattr(fused, "_compiled_gate", lambda: lambda gate, up: F.gelu(gate) * up)
    monkeypatch.setattr(fused.F, "rms_norm", lambda *_: (_ for _ in ()).throw(RuntimeError("no kernel")))
    assert fuse(layer, torch.float32) == {}
    assert "norm of Qwen2RMSNorm: no fused kernel (RuntimeError" in capsys.readouterr().out
    assert layer.norm.forward.__func__ is Qwen2RMSNorm.forward


def test_an_offset_norm_taken_for_a_plain_one_is_found_out(as_on_a_gpu: None) -> None:
    layer = nn.Sequential(Gemma3RMSNorm(16))
    layer[0].variance_epsilon = layer[0].eps
    assert fuse(layer, torch.float32) == {}


def test_nothing_happens_on_cpus() -> None:
    layer = _Layer()
    assert fuse_elementwise(layer, CPU, torch.float32, None) == {}


def _agreed() -> list[bool]:
    """Three kernels, of which the second fails on one rank."""
    return fused._agree([True, dist.get_rank() != 1, False], CPU, dist.group.WORLD)


def test_a_kernel_that_fails_on_one_rank_is_replaced_on_none() -> None:
    assert run_on_ranks(_agreed, 2) == [[True, False, False]] * 2


def test_gates_are_tried_without_matrices(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their matrices may sum over ranks: one that fails in between would leave the others waiting."""
    layer = _Layer()
    for name in ("gate_proj", "up_proj", "down_proj"):
        monkeypatch.setattr(getattr(layer.mlp, name), "forward", None)
    assert "gate of Qwen2MLP" in fuse(layer, torch.float32)


def test_ranks_without_a_compiler_name_the_same_kernels(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or ranks of nodes that have one would wait for an answer of another length."""
    asked: list[list[bool]] = []
    monkeypatch.setattr(fused, "_agree", lambda proved, *_: asked.append(list(proved)) or proved)
    fuse(_Layer(), torch.float32)
    monkeypatch.setattr(fused, "_compiled_gate", lambda: None)
    assert fuse(_Layer(), torch.float32) == {"norm of Qwen2RMSNorm": 1}
    assert asked == [[True, True], [True, False]]
