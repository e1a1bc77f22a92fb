"""Kernels in the place of what modules do: put in where they are proved on the device, left out where they are not."""

import copy
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.glm4v.modeling_glm4v import Glm4vTextMLP
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2MLP, Qwen2RMSNorm

from dhp.core.errors import PartFailed
from dhp.core.reports import KernelUse
from dhp.parallel.kernels import elementwise, replace
from dhp.parallel.kernels.replace import left_to_compiler, replace_kernels, replace_without_weights, require_compiler
from tests.helpers.compilers import compile_by
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny_families import FAMILIES, make_config

CPU = torch.device("cpu")


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config: Any = SimpleNamespace(hidden_size=16, intermediate_size=24, hidden_act="silu")
        self.norm, self.mlp = Qwen2RMSNorm(16), Qwen2MLP(config)
        self.together, self.other = Glm4vTextMLP(config), Gemma3RMSNorm(16)  # its weight is an offset from one
        self.norm.weight.data.normal_()
        self.other.weight.data.normal_()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.other(self.together(self.mlp(self.norm(states))))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for GPUs run on CPUs too, graphs of the compiler operation by operation; only nothing is gained."""
    monkeypatch.setattr(torch, "compile", compile_by("eager"))
    torch.compiler.reset()
    monkeypatch.setattr(replace, "can_compile", lambda: True)
    monkeypatch.setattr(replace, "_agree", lambda proved, *_: list(proved))
    monkeypatch.setattr(elementwise, "_KEPT", {})
    proved = replace.is_proved
    monkeypatch.setattr(replace, "is_proved", lambda trial, _, dtype: proved(trial, CPU, dtype))


def on_a_gpu(model: nn.Module, dtype: torch.dtype = torch.float32, **wanted: str) -> dict[tuple[str, str], int]:
    uses = replace_kernels(model, torch.device("cuda"), dtype, None, wanted)
    return {(use.kind, use.kernel): use.count for use in uses}


def on_a_cpu(model: nn.Module, dtype: torch.dtype = torch.float32, **wanted: str) -> dict[tuple[str, str], int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replace, "_agree", lambda proved, *_: list(proved))
        return {(u.kind, u.kernel): u.count for u in replace_kernels(model, CPU, dtype, None, wanted)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_proved_is_replaced_and_gives_the_same(dtype: torch.dtype, as_on_a_gpu: None) -> None:
    layer, states = _Layer(), torch.randn(5, 16)
    wanted = layer(states)
    grads = torch.autograd.grad(wanted.sum(), list(layer.parameters()))
    assert on_a_gpu(layer, dtype) == {("gate", "compiled"): 2, ("norm", "compiled"): 1, ("norm", "torch"): 1}
    assert {p.dtype for p in layer.parameters()} == {torch.float32}  # the proof gives the weights back
    found = layer(states)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(torch.autograd.grad(found.sum(), list(layer.parameters())), grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", [True, False])
def test_norms_of_one_class_with_and_without_weights_are_proved_apart(first: bool, as_on_a_gpu: None) -> None:
    """PyTorch's norm is for those with weights alone."""
    torch.manual_seed(0)
    model = nn.ModuleList(Gemma4RMSNorm(16, with_scale=scale) for scale in (first, not first))
    for norm in model:
        for weight in norm.parameters():
            nn.init.normal_(weight)
    states = torch.randn(5, 16)
    wanted = [norm(states) for norm in model]
    assert on_a_gpu(model) == {("norm", "compiled"): 1, ("norm", "torch"): 1}
    for norm, own in zip(model, wanted, strict=True):
        torch.testing.assert_close(norm(states), own, rtol=1e-5, atol=1e-6)


def test_a_kernel_that_deviates_or_fails_is_left_out(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    layer = _Layer()
    monkeypatch.setattr(elementwise, "_gated", lambda act, elementwise, up: F.gelu(elementwise) * up)
    monkeypatch.setattr(F, "rms_norm", lambda *_: (_ for _ in ()).throw(RuntimeError("no kernel")))
    assert on_a_gpu(layer)[("gate", "plain")] == 2
    assert "norm of Qwen2RMSNorm: no torch kernel (RuntimeError: no kernel)" in capsys.readouterr().out
    assert "forward" not in vars(layer.mlp)
    with pytest.raises(PartFailed, match="gate of Qwen2MLP: its kernel compiled was asked for and does not serve"):
        on_a_gpu(_Layer(), gate="compiled")


def test_what_is_asked_for_is_taken_and_plain_leaves_all_as_it_is(as_on_a_gpu: None) -> None:
    assert on_a_gpu(_Layer(), norm="written", gate="plain") == {("gate", "plain"): 2, ("norm", "written"): 2}
    layer = _Layer()
    assert on_a_gpu(layer, norm="plain", gate="plain") == {("gate", "plain"): 2, ("norm", "plain"): 2}
    assert not any("forward" in vars(module) for module in layer.modules())


def test_all_that_is_compiled_serves_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, object]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: given.append(how) or function)
    monkeypatch.setattr(elementwise, "tell_sizes_apart", lambda: None)  # which stays for a whole process
    elementwise.compile_layers([_Layer()], ())
    elementwise.compile_apart(lambda states: states)
    elementwise.compile_apart(lambda states: states, {"max_fusion_size": 8})
    inductor = importlib.import_module("torch._inductor").config
    assert elementwise.ALL_SIZES.keys() == {"triton.mix_order_reduction_non_strict_mode"}
    assert inductor.triton.mix_order_reduction_non_strict_mode is False  # its default, which is said otherwise
    assert [how["options"] for how in given] == [elementwise.ALL_SIZES] * 2 + [
        elementwise.ALL_SIZES | {"max_fusion_size": 8}
    ]


def test_on_the_meta_device_a_gate_that_is_to_be_compiled_saves_what_a_compiled_one_does() -> None:
    layer, states = _Layer().double(), torch.randn(5, 16, dtype=torch.float64)
    expected = torch.autograd.grad(layer(states).sum(), list(layer.parameters()))
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for kernel in ("auto", "plain", "compiled"):
        replace_without_weights(layer, torch.float64, {"gate": kernel, "norm": "plain"})
        into = shapes.setdefault(kernel, [])
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved, into=into: into.append(saved.shape) or saved, lambda saved: saved
        ):
            layer.mlp(states)
    assert shapes["auto"] == shapes["plain"] and shapes["plain"].count((5, 24)) == 4  # of the product's matrix too
    assert shapes["compiled"].count((5, 24)) == 3
    for ours, theirs in zip(torch.autograd.grad(layer(states).sum(), list(layer.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_on_cpus_what_is_written_out_serves_and_nothing_is_compiled() -> None:
    assert on_a_cpu(_Layer()) == {("gate", "plain"): 2, ("norm", "written"): 2}


def test_where_nothing_compiles_the_line_says_what_would_be_faster(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replace, "can_compile", lambda: False)
    uses = replace_kernels(_Layer(), torch.device("cuda"), torch.float32, None)
    (own,) = (use for use in uses if use.kind == "gate")
    assert own.kernel == "plain" and own.faster is not None and own.faster.startswith("gate compiled, which needs")
    with pytest.raises(PartFailed, match="text.kernels=gate:compiled: triton"):
        require_compiler("text", {"gate": "compiled"})
    require_compiler("text", {"gate": "plain", "norm": "auto"})


def test_ranks_without_a_compiler_name_the_same_kernels(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or ranks of nodes that have one would wait for an answer of another length."""
    without: list[list[bool]] = []
    monkeypatch.setattr(replace, "_agree", lambda proved, *_: without.append(list(proved)) or list(proved))
    with monkeypatch.context() as patch:
        patch.setattr(replace, "can_compile", lambda: False)
        served = on_a_gpu(_Layer())
    agreed, with_one = iter(without), []
    monkeypatch.setattr(replace, "_agree", lambda proved, *_: with_one.append(list(proved)) or next(agreed))
    assert on_a_gpu(_Layer()) == served
    assert [len(proved) for proved in with_one] == [len(proved) for proved in without] == [4, 1, 1]
    assert sum(map(sum, with_one)) > sum(map(sum, without))


def test_slower_kernels_are_not_tried_where_a_faster_one_serves(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that is compiled costs seconds of a start."""
    tried: list[tuple[str, str]] = []
    find = replace._try
    monkeypatch.setattr(replace, "_try", lambda name, one: tried.append((name, one.kernel)) or find(name, one))
    on_a_gpu(_Layer())
    of_torch = [kernel for name, kernel in tried if name == "norm of Qwen2RMSNorm"]
    of_ours = [kernel for name, kernel in tried if name == "norm of Gemma3RMSNorm"]  # torch's has no offset
    assert (of_torch, of_ours) == (["torch"], ["torch", "compiled"])


def _agreed() -> list[bool]:
    """Three kernels, of which the second fails on one rank."""
    return replace._agree([True, dist.get_rank() != 1, False], CPU, dist.group.WORLD)


def test_a_kernel_that_fails_on_one_rank_is_replaced_on_none() -> None:
    assert run_on_ranks(_agreed, 2) == [[True, False, False]] * 2


def test_gates_are_tried_without_matrices(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their matrices may sum over ranks: one that fails in between would leave the others waiting."""
    layer = _Layer()
    for name in ("gate_proj", "up_proj", "down_proj"):
        monkeypatch.setattr(getattr(layer.mlp, name), "forward", None)
    assert on_a_gpu(layer)[("gate", "compiled")] == 2


def test_a_gate_that_does_more_between_its_matrices_is_left_alone(as_on_a_gpu: None) -> None:
    class Capped(Qwen2MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(max=0.5))

    config: Any = SimpleNamespace(hidden_size=16, intermediate_size=24, hidden_act="silu")
    assert on_a_gpu(nn.Sequential(Capped(config))) == {("gate", "plain"): 1}


def test_a_modules_own_file_keeps_its_rotary_positions() -> None:
    config = modeling_qwen2.Qwen2Config(hidden_size=16, num_attention_heads=2, num_key_value_heads=1)
    config._attn_implementation = "eager"
    ours, theirs = (Qwen2Attention(config, 0) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    own = modeling_qwen2.apply_rotary_pos_emb
    assert on_a_cpu(ours) == {("rotary", "written"): 1}
    assert modeling_qwen2.apply_rotary_pos_emb is own and "forward" not in vars(theirs)
    states, angles = torch.randn(1, 5, 16), (torch.randn(1, 5, 8), torch.randn(1, 5, 8))
    for one, other in zip(*(_outputs(module, states, angles) for module in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def _outputs(module: nn.Module, states: torch.Tensor, angles: Any) -> list[torch.Tensor]:
    output, _ = module(states, position_embeddings=angles, attention_mask=None)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), list(module.parameters()))]


@pytest.mark.parametrize("name", FAMILIES)
def test_all_norms_and_rotary_positions_of_each_declared_family_are_served(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(make_config(name))
    for dtype in (torch.float32, torch.bfloat16):
        found = on_a_cpu(copy.deepcopy(model), dtype)
        assert set(found) <= {("norm", "written"), ("rotary", "written"), ("gate", "plain")}
        assert ("rotary", "written") in found


def test_compiled_layers_keep_their_own_but_for_what_is_asked_for() -> None:
    assert left_to_compiler({}) == {"rotary": "plain", "gate": "plain"}
    assert left_to_compiler({"rotary": "written", "norm": "auto"}) == {"rotary": "written", "gate": "plain"}


def test_uses_are_counted_by_kind_and_kernel() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replace, "_agree", lambda proved, *_: list(proved))
        uses = replace_kernels(nn.ModuleList(_Layer() for _ in range(3)), CPU, torch.float32, None)
    assert uses == (KernelUse("gate", "plain", 6), KernelUse("norm", "written", 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_means_its_eps_otherwise_is_left_alone(dtype: torch.dtype) -> None:
    class RootThenEpsRMSNorm(Qwen2RMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            wide = hidden_states.float()
            return self.weight * (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)).to(hidden_states.dtype)

    class OtherEpsRMSNorm(Qwen2RMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
            unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 3e-6)
            return self.weight * unit.to(hidden_states.dtype)

    for kind in (RootThenEpsRMSNorm, OtherEpsRMSNorm):
        assert on_a_cpu(nn.Sequential(kind(48)), dtype) == {("norm", "plain"): 1}
    assert on_a_cpu(nn.Sequential(Qwen2RMSNorm(48)), dtype) == {("norm", "written"): 1}


def test_the_compiler_never_gives_up_on_gates(as_on_a_gpu: None) -> None:
    """Packed and padded rows, answers of one prompt and of several, with gradients, without, and of frozen layers."""
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        layer = _Layer()
        on_a_gpu(layer)
        for trained in (True, False):
            layer.requires_grad_(trained)
            for shape in ((1, 64, 16), (3, 50, 16), (1, 1, 16), (4, 1, 16), (77, 16), (1, 16)):
                layer.mlp(torch.randn(shape, requires_grad=True)).sum().backward()
                layer.mlp(torch.randn(shape))
                with torch.no_grad():
                    layer.mlp(torch.randn(shape))
