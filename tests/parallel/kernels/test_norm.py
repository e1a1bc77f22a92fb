"""RMS norms in few passes: equal to the library's modules, of every kind that declared families have."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from dhp.parallel.kernels import elementwise
from dhp.parallel.kernels.elementwise import is_norm, is_proved, norm_forwards, norm_trial

CPU = torch.device("cpu")
NORMS = {
    "weight": lambda: Qwen2RMSNorm(48),
    "offset from one": lambda: Gemma3RMSNorm(48),
    "offset, another eps": lambda: Qwen3_5RMSNorm(48, 1e-5),
    "scale": lambda: Gemma4RMSNorm(48),
    "no weight": lambda: Gemma4RMSNorm(48, with_scale=False),
}


def with_gradients(forward: Any, module: nn.Module, states: Tensor) -> list[Tensor]:
    leaf = states.clone().requires_grad_()
    output = forward(leaf)
    torch.manual_seed(1)
    return [
        output.detach(),
        *torch.autograd.grad(output, [leaf, *module.parameters()], torch.randn(output.shape).to(output.dtype)),
    ]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def make(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    module = NORMS[name]().to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module, torch.randn(3, 50, 48).to(dtype)


def proved(module: nn.Module, kernel: str, dtype: torch.dtype) -> list[Any]:
    return [forward for forward in norm_forwards(module, kernel) if is_proved(norm_trial(module, forward), CPU, dtype)]


@pytest.mark.parametrize("kernel", ["torch", "written"])
@pytest.mark.parametrize("name", NORMS)
def test_exactly_one_way_to_mean_the_weight_is_proved_and_gives_the_same(name: str, kernel: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        module, states = make(name, dtype)
        found = proved(module, kernel, dtype)
        if kernel == "torch" and name not in ("weight", "scale"):
            assert not found  # PyTorch's norm has no offset
            continue
        (forward,) = found
        assert {parameter.dtype for parameter in module.parameters()} <= {dtype}
        plain, ours = (with_gradients(one, module, states) for one in (module.forward, forward))
        if dtype == torch.float32:
            assert all(error(one, own) < 1e-6 for one, own in zip(ours, plain, strict=True))
            continue
        exact = with_gradients(module.double().forward, module, states.double())
        for one, own, wanted in zip(ours, plain, exact, strict=True):
            assert one.dtype == own.dtype and error(one, wanted) <= 1.02 * error(own, wanted)


def test_a_frozen_weight_gets_no_gradient_and_backward_keeps_no_states_in_float32() -> None:
    module, states = make("weight", torch.bfloat16)
    module.weight.requires_grad_(False)
    (forward,) = proved(module, "written", torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        output = forward(states.requires_grad_())
    output.sum().backward()
    assert module.weight.grad is None and not module.weight.requires_grad and states.grad is not None
    wide = [tensor for tensor in kept if tensor.dtype == torch.float32]
    assert [tuple(tensor.shape) for tensor in wide] == [(3, 50, 1)]


def test_what_is_no_rms_norm_over_the_last_axis_is_not_taken_for_one() -> None:
    assert is_norm(Qwen2RMSNorm(8)) and not is_norm(nn.LayerNorm(8)) and not is_norm(nn.Linear(8, 8))
    assert not is_norm(Qwen3_5RMSNormGated(8))  # its forward takes a gate as well


def test_rows_of_other_lengths_compile_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    torch.compiler.reset()
    elementwise._compiled.cache_clear()
    module, states = make("offset from one", torch.float32)
    (forward,) = proved(module, "compiled", torch.float32)
    with_gradients(forward, module, states)
    made = counter.frame_count
    for tokens in (2, 7, 64):
        with_gradients(forward, module, states[:, :1].expand(3, tokens, 48).contiguous())
    assert counter.frame_count == made > 0
    elementwise._compiled.cache_clear()


@pytest.mark.parametrize("name", NORMS)
def test_the_compiler_never_gives_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind eight graphs torch runs a function uncompiled, with no more than a warning. Proofs of all candidates, and
    states with and without an axis of heads, of one token, with and without gradients, weights frozen: fewer."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=CompileCounter()))
    torch.compiler.reset()
    elementwise._compiled.cache_clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        module, _ = make(name, torch.bfloat16)
        for forward in norm_forwards(module, "compiled"):
            is_proved(norm_trial(module, forward, small=True), CPU, torch.float32)
        (forward,) = proved(module, "compiled", torch.bfloat16)
        for trained in (True, False):
            module.requires_grad_(trained)
            # Packed and padded rows, heads, one head of a rank, answers of one prompt and of several.
            for shape in (
                (1, 64, 48),
                (3, 50, 48),
                (1, 301, 4, 48),
                (2, 9, 1, 48),
                (1, 1, 48),
                (4, 1, 48),
                (4, 1, 1, 48),
            ):
                states = torch.randn(shape).bfloat16()
                torch.autograd.grad(forward(states.requires_grad_()), states, torch.ones(shape).bfloat16())
                with torch.no_grad():
                    forward(states)
    elementwise._compiled.cache_clear()
