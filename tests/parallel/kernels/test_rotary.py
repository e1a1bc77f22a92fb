"""Rotary positions in one pass: equal to the library's functions, of every form that declared families have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers.models.cohere2 import modeling_cohere2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.dinov3_vit import modeling_dinov3_vit
from transformers.models.ernie4_5_vl_moe import modeling_ernie4_5_vl_moe
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.glm4v import modeling_glm4v
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3_5 import modeling_qwen3_5

from dhp.parallel.kernels import rotary
from dhp.parallel.kernels.rotary import in_one_pass
from tests.helpers.rows import slow_but

CPU = torch.device("cpu")
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


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """Graphs are made, counted and run operation by operation: compiling them to kernels would take minutes."""
    found = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=found))
    torch.compiler.reset()
    rotary._compiled.cache_clear()
    yield found
    rotary._compiled.cache_clear()


WAYS = [*product(FUNCTIONS, COMPILING)]
QUICK = [(name, how) for name, how in WAYS if how == "written" or name in ("halves", "neighbours")]


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


def test_rows_of_other_lengths_compile_nothing_anew(counter: CompileCounter) -> None:
    function = modeling_qwen2_5_vl.apply_rotary_pos_emb_vision
    ours = in_one_pass(function, CPU, torch.float32, True)
    outputs_and_gradients(ours, *states_of(function, 6, torch.float32))
    made = counter.frame_count
    for tokens in (5, 9, 64, 301):
        outputs_and_gradients(ours, *states_of(function, tokens, torch.float32))
    assert counter.frame_count == made


@pytest.mark.parametrize(("function", "places"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_compiler_never_gives_up(
    function: Callable[..., Any], places: tuple[str, ...], counter: CompileCounter
) -> None:
    """torch makes eight graphs of a function and runs it uncompiled from then on, with no more than a warning: what
    proving makes, and calls with either format of angles, one key's head and gradients or none, stay within."""
    dtype = torch.bfloat16
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
