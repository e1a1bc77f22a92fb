"""Compiled norms, rotary positions and gates."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers.models.cohere2 import modeling_cohere2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.dinov3_vit import modeling_dinov3_vit
from transformers.models.ernie4_5_vl_moe import modeling_ernie4_5_vl_moe
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.glm4v import modeling_glm4v
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from dhp.parallel.kernels import elementwise, rotary
from dhp.parallel.kernels.elementwise import compile_layers, eager, is_norm, is_proved, norm_forwards, norm_trial
from dhp.parallel.kernels.rotary import in_one_pass
from tests.helpers.compilers import compile_by
from tests.helpers.rows import slow_but

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
    monkeypatch.setattr(torch, "compile", compile_by(counter))
    torch.compiler.reset()
    elementwise._compiled_norm.cache_clear()
    module, states = make("offset from one", torch.float32)
    (forward,) = proved(module, "compiled", torch.float32)
    with_gradients(forward, module, states)
    made = counter.frame_count
    for tokens in (2, 7, 64):
        with_gradients(forward, module, states[:, :1].expand(3, tokens, 48).contiguous())
    assert counter.frame_count == made > 0
    elementwise._compiled_norm.cache_clear()


@pytest.mark.parametrize("name", slow_but(NORMS, "offset from one"))
def test_the_compiler_never_gives_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind eight graphs torch runs a function uncompiled, with no more than a warning. Proofs of all candidates, and
    states with and without an axis of heads, of one token, with and without gradients, weights frozen: fewer."""
    monkeypatch.setattr(torch, "compile", compile_by(CompileCounter()))
    torch.compiler.reset()
    elementwise._compiled_norm.cache_clear()
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
    elementwise._compiled_norm.cache_clear()


HALVES, NEIGHBOURS = ("halves",) * 3, ("neighbours",) * 3
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "halves": (modeling_qwen2.apply_rotary_pos_emb, HALVES),
    "halves in float32, of a tower": (modeling_qwen2_5_vl.apply_rotary_pos_emb_vision, HALVES),
    "a part of each head": (modeling_qwen3_5.apply_rotary_pos_emb, HALVES),
    "neighbours": (modeling_glm4v.apply_rotary_pos_emb, NEIGHBOURS),
    "neighbours in float32": (modeling_cohere2.apply_rotary_pos_emb, NEIGHBOURS),
    "neighbours, from float32": (modeling_ernie4_5_vl_moe.apply_rotary_pos_emb, NEIGHBOURS),
    "neighbours to halves": (
        modeling_deepseek_v3.apply_rotary_pos_emb_interleave,
        ("neighbours", "halves", "first half"),
    ),
    "one at a time": (modeling_gemma4.apply_rotary_pos_emb, HALVES),
}
COMPILING = {"written": False, "compiled": True}


def states_of(function: Callable[..., Any], tokens: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Queries of four heads and keys of two (or queries alone), and cosines and sines, as a layer would give them:
    views of a matrix product's rows."""
    torch.manual_seed(tokens)
    vision = "vision" in function.__name__
    make = lambda heads: torch.randn(1, tokens, heads, 16).to(dtype)
    values = [make(4), make(2)][: 1 if function is modeling_gemma4.apply_rotary_pos_emb else 2]
    values = [value[0] if vision else value.transpose(1, 2) for value in values]
    width = 8 if function is modeling_qwen3_5.apply_rotary_pos_emb else 16
    angles = [torch.randn(*(() if vision else (1,)), tokens, width).to(dtype) for _ in range(2)]
    return values, angles


def outputs_and_gradients(function: Callable[..., Any], values: list[Tensor], angles: list[Tensor]) -> list[Tensor]:
    leaves = [value.clone().requires_grad_() for value in values]
    found = function(*leaves, *angles)
    outputs = list(found) if isinstance(found, tuple) else [found]
    torch.manual_seed(1)
    return [output.detach() for output in outputs] + list(
        torch.autograd.grad(outputs, leaves, [torch.randn(output.shape).to(output.dtype) for output in outputs])
    )


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """Graphs are made, counted and run operation by operation: compiling them to kernels would take minutes."""
    found = CompileCounter()
    monkeypatch.setattr(torch, "compile", compile_by(found))
    torch.compiler.reset()
    rotary._compiled.cache_clear()
    yield found
    rotary._compiled.cache_clear()


WAYS = [*product(FUNCTIONS, COMPILING)]
QUICK = [(name, how) for name, how in WAYS if how == "written"]


@pytest.mark.parametrize(("name", "how"), slow_but(WAYS, *QUICK))
def test_it_gives_what_the_library_gives(name: str, how: str, counter: CompileCounter) -> None:
    function, compiled = FUNCTIONS[name][0], COMPILING[how]
    for dtype, near in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        values, angles = states_of(function, 7, dtype)
        ours = in_one_pass(function, CPU, dtype, compiled)
        if ours is None:  # the library's own goes through float32 there
            assert (
                dtype == torch.float64
                and "float32" in function.__code__.co_names + function.__code__.co_consts
                or ("float" in function.__code__.co_names)
            )
            continue
        for found, wanted in zip(
            outputs_and_gradients(ours, values, angles), outputs_and_gradients(function, values, angles), strict=True
        ):
            assert found.shape == wanted.shape and error(found, wanted) < near


@pytest.mark.parametrize(("function", "places"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_in_16_bits_its_error_is_not_above_the_librarys(function: Callable[..., Any], places: tuple[str, ...]) -> None:
    values, angles = states_of(function, 301, torch.bfloat16)
    exact = outputs_and_gradients(function, [v.double() for v in values], [a.double() for a in angles])
    plain = outputs_and_gradients(function, values, angles)
    ours = outputs_and_gradients(in_one_pass(function, CPU, torch.bfloat16, False), values, angles)
    for found, own, wanted in zip(ours, plain, exact, strict=True):
        assert found.dtype == own.dtype and error(found, wanted) <= 1.02 * error(own, wanted)


def test_each_form_is_found_by_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the form taken away, none of the others is taken for it."""
    for function, places in FUNCTIONS.values():
        assert in_one_pass(function, CPU, torch.float32, False) is not None
        others = tuple(form for form in rotary.FORMS if form[:3] != places)
        with monkeypatch.context() as patch:
            patch.setattr(rotary, "FORMS", others)
            assert in_one_pass(function, CPU, torch.float32, False) is None


def test_nothing_of_queries_and_keys_is_kept_for_backward() -> None:
    values, angles = states_of(modeling_qwen2.apply_rotary_pos_emb, 7, torch.float32)
    kept: list[Tensor] = []
    ours = in_one_pass(modeling_qwen2.apply_rotary_pos_emb, CPU, torch.float32, False)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        ours(*(value.requires_grad_() for value in values), *angles)
    assert {tuple(tensor.shape) for tensor in kept} == {(1, 1, 7, 16)}


def test_calls_of_another_kind_go_to_the_library() -> None:
    """Another number format than was tried, and angles that something trains."""
    own = modeling_qwen2.apply_rotary_pos_emb
    seen: list[str] = []

    def noting(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        seen.append(str(q.dtype))
        return own(q, k, cos, sin, unsqueeze_dim)

    ours = in_one_pass(noting, CPU, torch.float32, False)
    seen.clear()
    values, angles = states_of(own, 3, torch.float32)
    ours(*values, *angles)
    assert not seen
    ours(*(value.double() for value in values), *angles)
    ours(*values, angles[0].requires_grad_(), angles[1])
    assert seen == ["torch.float64", "torch.float32"]
    assert in_one_pass(lambda q, k: (q, k), CPU, torch.float32, False) is None


def test_a_function_that_takes_none_of_what_is_tried_is_not_replaced() -> None:
    """Their angles have all axes already, or those of a part of the tokens: nothing is known of what they give."""
    for function in (modeling_dinov3_vit.apply_rotary_pos_emb, modeling_gpt_oss._apply_rotary_emb):
        assert in_one_pass(function, CPU, torch.float32, False) is None


def test_shapes_of_another_kind_and_what_is_no_tensor_go_to_the_library() -> None:
    seen: list[tuple[int, ...]] = []

    def noting(q: Tensor, k: Any, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        seen.append(tuple(cos.shape))
        own = modeling_qwen2.apply_rotary_pos_emb
        return own(q, q if k is None else k, cos, sin, unsqueeze_dim)

    ours = in_one_pass(noting, CPU, torch.float32, False)
    (query, key), (cos, sin) = states_of(modeling_qwen2.apply_rotary_pos_emb, 3, torch.float32)
    seen.clear()
    ours(query, key, cos[0], sin[0], unsqueeze_dim=0)  # one sequence's angles, for a batch of one
    ours(query.transpose(1, 2), key.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    assert not seen
    ours(query, None, cos, sin)
    ours(query, key, cos.expand(2, 3, 16), sin.expand(2, 3, 16))  # widens the states
    ours(query, key, cos, sin.clone().requires_grad_())
    assert seen == [(1, 3, 16), (2, 3, 16), (1, 3, 16)]


def test_rotary_positions_of_other_lengths_compile_nothing_anew(counter: CompileCounter) -> None:
    function = modeling_qwen2_5_vl.apply_rotary_pos_emb_vision
    ours = in_one_pass(function, CPU, torch.float32, True)
    outputs_and_gradients(ours, *states_of(function, 6, torch.float32))
    made = counter.frame_count
    for tokens in (5, 9, 64, 301):
        outputs_and_gradients(ours, *states_of(function, tokens, torch.float32))
    assert counter.frame_count == made


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(FUNCTIONS, "neighbours to halves"))
def test_the_compiler_never_gives_up_on_rotary_positions(name: str, counter: CompileCounter) -> None:
    """torch makes eight graphs of a function and runs it uncompiled from then on, with no more than a warning: what
    proving makes, and calls with either format of angles, one key's head and gradients or none, stay within."""
    (function, _), dtype = FUNCTIONS[name], torch.bfloat16
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        ours = in_one_pass(function, CPU, dtype, True)
        assert ours is not None
        for tokens, angle in ((64, dtype), (301, torch.float32), (1, dtype)):
            values, angles = states_of(function, tokens, dtype)
            angles = [one.to(angle) for one in angles]
            outputs_and_gradients(ours, values, angles)
            with torch.no_grad():
                ours(*(value[..., :1, :] for value in values), *(one[..., :1, :] for one in angles))
    assert 0 < counter.frame_count


def test_forms_are_distinguished_without_a_compiler(counter: CompileCounter) -> None:
    """Only the form that a function has is compiled, forward and back: a second each, and there are six."""
    function, _ = FUNCTIONS["neighbours, from float32"]  # the fifth
    assert in_one_pass(function, CPU, torch.float32, True) is not None
    assert rotary._compiled.cache_info().currsize == 2


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

    monkeypatch.setattr(torch, "compile", compile_by(backend))
    layer = Layer()
    names = [name for name, _ in layer.named_modules()]
    compile_layers([layer], {"Mixer"})
    for rows in (3, 4, 5, 6):
        states = torch.randn(rows, 2)
        torch.testing.assert_close(layer(states, rows), layer.norm(states).flip(0) * 2)
    assert layer.lengths == [3, 4, 5, 6] and layer.mixer.compiled == [False] * 4
    assert len(graphs) == 1, "rows of another length compiled anew"
    assert [name for name, _ in layer.named_modules()] == names
