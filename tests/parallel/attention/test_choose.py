"""The adapter of flash-attn, on a stand-in for the package that computes by plain math; and what it stands on."""

from __future__ import annotations

import sys
from inspect import signature
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dhp.core.batch import TokenRange
from dhp.core.errors import ConfigError
from dhp.parallel import device
from dhp.parallel.attention import attention_kernels
from dhp.parallel.attention.attention_kernels import (
    FLASH_ATTENTION_2,
    Block,
    Dense,
    FlashAttention2,
    choose_kernel,
    require,
    require_package,
)
from dhp.parallel.attention.ring import Ring, merge, ring_attention
from dhp.parallel.attention.segment_plan import plan_segments
from dhp.parallel.attention.segments import attend_segments
from dhp.parallel.attention.visibility import LayerRule
from tests.helpers.flash_attention import flash_attn_interface

CPU = torch.device("cpu")
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stand-in; the names of its functions as they are called."""
    calls: list[str] = []
    fake = flash_attn_interface(calls)
    monkeypatch.setattr(attention_kernels, "_package", lambda: fake)
    return calls


def states(tokens: int, width: int, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of four heads, keys and values of two."""
    random = torch.Generator().manual_seed(tokens)
    draw = lambda count, heads: torch.randn(count, heads, width, dtype=torch.float64, generator=random)
    return draw(tokens, 4), draw(keys or tokens, 2), draw(keys or tokens, 2)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3)])
def test_segments_by_the_package_equal_pytorchs(package: list[str], causal: bool, window: int | None) -> None:
    lengths, layer = [5, 2, 9], LayerRule(window=window)
    given = states(sum(lengths), 8)
    found = [
        attend_segments(*given, plan_segments(lengths, CPU, causal, varlen, backend=backend), 0.3, layer)
        for backend, varlen in ((FLASH_ATTENTION_2, True), ("auto", False))
    ]
    assert package == ["flash_attn_varlen_func"]
    torch.testing.assert_close(*found, **EXACT)


@pytest.mark.parametrize("width", [8, 6])  # heads of six are filled up to eight
@pytest.mark.parametrize(("tokens", "keys", "diagonal"), [(5, 5, True), (5, 7, False)])
def test_a_block_equals_attention_written_out(
    package: list[str], width: int, tokens: int, keys: int, diagonal: bool
) -> None:
    query, key, value = states(tokens, width, keys)
    block = Block(diagonal, 0.4)
    grad = torch.randn_like(query)
    results = []
    for kernel in (FlashAttention2(), Dense()):
        output, lse = kernel.forward(query, key, value, block)
        results.append((output, lse, *kernel.backward(grad, query, key, value, output, lse, block)))
    assert package == ["_flash_attn_varlen_forward", "_flash_attn_varlen_backward"]
    for own, wanted in zip(*results, strict=True):
        torch.testing.assert_close(own, wanted, **EXACT)


def test_blocks_put_together_by_their_log_sum_exp_equal_the_whole(package: list[str]) -> None:
    query, key, value = states(4, 8, keys=9)
    block, kernel = Block(False, 0.3), FlashAttention2()
    output, lse = torch.zeros_like(query), torch.full((4, 4), float("-inf"), dtype=torch.float64)
    for part in (slice(0, 2), slice(2, 9)):
        merge(output, lse, *kernel.forward(query, key[part], value[part], block))
    wanted = Dense().forward(query, key, value, block)
    torch.testing.assert_close((output, lse), wanted, **EXACT)


def test_a_ring_takes_its_blocks_from_the_package(package: list[str]) -> None:
    results = []
    for backend in (FLASH_ATTENTION_2, "auto"):
        given = [s.requires_grad_() for s in states(6, 8)]
        ring = Ring(((TokenRange(0, 0, 6),),), 0, None, True, backend=backend)  # of one rank, which sends nothing
        output = ring_attention(*given, ring, 0.3)
        output.square().sum().backward()
        results.append((output.detach(), *(s.grad for s in given)))
    assert package == ["_flash_attn_varlen_forward", "_flash_attn_varlen_backward"]
    for own, wanted in zip(*results, strict=True):
        torch.testing.assert_close(own, wanted, **EXACT)


def test_heads_wider_than_its_kernels_take_another() -> None:
    assert isinstance(choose_kernel(torch.zeros(1, 1, 256), FLASH_ATTENTION_2), FlashAttention2)
    assert not isinstance(choose_kernel(torch.zeros(1, 1, 264), FLASH_ATTENTION_2), FlashAttention2)


@pytest.mark.parametrize(
    ("installed", "capability", "told"),
    [
        (None, None, "flash-attn is not installed"),
        ("2.6.3", None, "flash-attn 2.6.3 is here, and its functions are known from 2.7 on, below 3.0"),
        ("2.8.3", None, "torch finds no CUDA device"),
        ("2.8.3", (7, 5), "the GPU has compute capability 7.5, its kernels need 8.0"),
        ("2.8.3", (9, 0), "flash-attn 2.8.3 cannot be loaded: import of flash_attn halted"),
    ],
)
def test_what_is_missing_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, capability: Any, told: str
) -> None:
    monkeypatch.setattr(device, "_installed", lambda package, module: installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    attention_kernels._package.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ConfigError) as refused:
        require("text.attention_backend", torch.device("cuda"))
    assert str(refused.value).startswith(f"text.attention_backend=flash_attention_2: {told}")
    assert "Set text.attention_backend=auto" in str(refused.value)
    if installed == "2.8.3":
        require_package("text.attention_backend")  # which asks no GPU
        return
    with pytest.raises(ConfigError, match=told.replace(".", r"\.")):
        require_package("text.attention_backend")


def test_a_part_on_a_cpu_has_no_use_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = SimpleNamespace(version="2.8.3", obstacle=None)
    monkeypatch.setattr(attention_kernels, "find_extra", lambda name: usable)
    with pytest.raises(ConfigError, match="its kernels run on GPUs, and the part computes on cpu"):
        require("vision.attention_backend", CPU)


def test_the_package_has_the_functions_that_are_called() -> None:
    """A canary: what the stand-in takes for granted, where the package is installed."""
    own = pytest.importorskip("flash_attn.flash_attn_interface")
    fake = flash_attn_interface([])
    for name in ("flash_attn_varlen_func", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"):
        function = getattr(own, name)
        function = getattr(function, "_init_fn", function)  # of an operator of torch's, what it was made of
        wanted = [n for n, p in signature(getattr(fake, name)).parameters.items()]
        found = list(signature(function).parameters)
        assert set(wanted) <= set(found), f"{name} lacks {set(wanted) - set(found)}"
        places = [
            found.index(n) for n in wanted if n in ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv")
        ]
        assert all(before < after for before, after in pairwise(places)), f"{name}: {found}"
