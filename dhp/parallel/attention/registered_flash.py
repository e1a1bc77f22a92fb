"""Flash attention of packages that torch has registered."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import attention as registry

from dhp.parallel.kernels.elementwise import Trial, is_proved, random_states

# By torch's name, the fastest first, the package whose kernels torch then calls in the place of flash attention 2:
# flash-attn-4, and flash-attn's for Hopper.
PACKAGES = {"FA4": "flash_attn.cute", "FA3": "flash_attn_interface"}
_LENGTHS = (5, 130, 1, 61)  # tokens of the segments of a trial
_WINDOW = 7


class RegisteredFlash:
    """Which of torch's registered implementations this process computes attention with. name: None for torch's own.

    Each kind of call is proved when it comes first, forward and backward, on the very device: with a deviation, or
    where the package raises, torch's own serves from then on."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._proved: set[tuple[Any, ...]] = set()

    def choose(self) -> str | None:
        """Activate the fastest that is installed, for calls from now on; its name."""
        for name, package in PACKAGES.items():
            if self.name is None and name in registry.list_flash_attention_impls() and _is_installed(package):
                try:
                    registry.activate_flash_attention_impl(name)
                except Exception as error:  # a package's own, of any kind: another one may serve
                    print(f"attention by {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    registry.restore_flash_attention_impl()
                else:
                    self.name = name
        return self.name

    def admit(self, kind: tuple[Any, ...], device: torch.device, dtype: torch.dtype, make: Callable[[], Trial]) -> None:
        """Prove calls of this kind, if none was proved before. make: what is compared."""
        if self.name is None or (kind, dtype) in self._proved:
            return
        self._proved.add((kind, dtype))
        try:
            proved = is_proved(make(), device, dtype)
            why = "its results deviate"
        except Exception as error:
            proved, why = False, f"{type(error).__name__}: {error}"
        if not proved:
            print(f"attention by {self.name} is not used: {why} ({kind}, {dtype})", file=sys.stderr, flush=True)
            self.restore()

    def restore(self) -> None:
        """Let torch's own compute again."""
        if self.name is not None:
            registry.restore_flash_attention_impl()
            self.name = None


REGISTERED = RegisteredFlash()


def segments_trial(heads: tuple[int, int, int], causal: bool, windowed: bool, attend: Any) -> Trial:
    """Segments of several lengths against attention written out. heads: of queries, of keys, and their width. attend:
    as `dhp.parallel.attention.attention_kernels.attend_varlen`."""
    bounds = torch.tensor([0, *_LENGTHS]).cumsum(0)
    window, scale = _WINDOW if windowed else None, heads[2] ** -0.5
    seen = _seen(bounds, causal, window)

    def ours(*states: Tensor) -> Tensor:
        there = bounds.to(states[0].device, torch.int32)
        return attend(*states, there, max(_LENGTHS), causal, scale, window)

    return Trial(partial(_written_out, seen, scale), ours, _states(*heads))


def block_trial(heads: tuple[int, int, int], kernel: Any, block: Any) -> Trial:
    """One block of queries and keys. kernel, block: of `dhp.parallel.attention.attention_kernels`."""
    tokens = sum(_LENGTHS)
    seen = _seen(torch.tensor([0, tokens]), block.diagonal, None)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return cast(Tensor, _OneBlock.apply(query, key, value, kernel, block))

    return Trial(partial(_written_out, seen, block.scale), ours, _states(*heads))


class _OneBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, kernel: Any, block: Any) -> Tensor:
        output, lse = kernel.forward(query, key, value, block)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.kernel, ctx.block = kernel, block
        return cast(Tensor, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        found = ctx.kernel.backward(gradients[0].contiguous(), query, key, value, output, lse, ctx.block)
        return (*found, None, None)


def _states(heads: int, groups: int, width: int) -> list[Tensor]:
    tokens = sum(_LENGTHS)
    return random_states((tokens, heads, width), (tokens, groups, width), (tokens, groups, width))


def _written_out(seen: Tensor, scale: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of [tokens, heads, width], keys and values maybe with fewer heads."""
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    scores = scores.masked_fill(~seen.to(query.device), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


def _seen(bounds: Tensor, causal: bool, window: int | None) -> Tensor:
    """Which keys each query sees: [queries, keys]."""
    at = torch.arange(int(bounds[-1]), device=bounds.device)
    segment = torch.searchsorted(bounds[1:].contiguous(), at, right=True)
    behind = at[:, None] - at[None, :]
    seen = segment[:, None] == segment[None, :]
    if causal:
        seen &= behind >= 0
    return seen if window is None else seen & (behind < window)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # a folder above it is missing
        return False
