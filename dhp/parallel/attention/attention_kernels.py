"""Chooses and runs attention kernels for blocks."""

from functools import cache, partial
from inspect import signature
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dhp.core.errors import ConfigError
from dhp.parallel.attention.registered_flash import REGISTERED, block_trial, segments_trial
from dhp.parallel.device import FLASH_ATTENTION, find_extra, flash_attention_package

QkvGradients = tuple[Tensor, Tensor, Tensor]
AUTO = "auto"  # an attention_backend: PyTorch's own kernels


class Block(NamedTuple):
    """How queries see keys.

    diagonal: both are the same tokens under causal attention, and each query sees the keys up to its own; else each
    query sees all keys. scale: factor of the scores. hidden: [..., queries, keys], keys that a query does not see, and
    softcap: what scores are capped at (`dhp.parallel.attention.visibility.LayerRule`); `Dense` alone knows both."""

    diagonal: bool
    scale: float
    hidden: Tensor | None = None
    softcap: float | None = None


class Kernel(Protocol):
    """query [queries, heads, dim]; key, value [keys, kv heads, dim]; lse [heads, queries] in float32 (or float64)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Output, and log-sum-exp of the scores."""

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, block: Block
    ) -> QkvGradients:
        """This block's part of the gradients of query, key and value."""


class CpuFlash:
    """PyTorch's flash attention for CPUs. Any head dim; keys may have fewer heads."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        states = (_heads_first(s) for s in (query, key, value))
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *states, 0.0, block.diagonal, scale=block.scale
        )
        return output[0].transpose(0, 1), lse[0]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, block: Block
    ) -> QkvGradients:
        given = (_heads_first(s) for s in (grad, query, key, value, output))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, lse[None].contiguous(), 0.0, block.diagonal, scale=block.scale
        )
        query_, key_, value_ = (g[0].transpose(0, 1) for g in gradients)
        return query_, key_, value_


class Dense:
    """Attention written out in float32 (float64 for float64 inputs): the reference, and what runs without a kernel.

    The only one with masks and soft caps, and the only one that takes several segments [..., tokens, heads, dim]."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        scores, _, _, v = self._scores(query, key, value, block)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        if block.hidden is not None:
            weights = weights.masked_fill(block.hidden, 0.0)  # a query that sees none of these keys: -inf - -inf
        return (weights @ v).transpose(-3, -2).to(query.dtype), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, block: Block
    ) -> QkvGradients:
        scores, q, k, v = self._scores(query, key, value, block)
        weights = (scores - lse[..., None]).exp()
        g, o = (s.transpose(-3, -2).to(v.dtype) for s in (grad, output))
        slopes = weights * (g @ v.transpose(-2, -1) - (g * o).sum(-1, keepdim=True)) * block.scale
        if block.softcap is not None:
            # Hidden scores are -inf, and their weights 0.
            slopes = slopes * (1 - (scores.clamp(min=-block.softcap) / block.softcap).square())
        heads = key.shape[-2]
        shared = lambda s: s.unflatten(-3, (heads, -1)).sum(-3).transpose(-3, -2)  # over queries of one key head
        return (
            (slopes @ k).transpose(-3, -2).to(query.dtype),
            shared(slopes.transpose(-2, -1) @ q).to(key.dtype),
            shared(weights.transpose(-2, -1) @ g).to(value.dtype),
        )

    def _scores(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, ...]:
        """Scores [..., heads, queries, keys], and the states with heads first in the exact format."""
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        q, k, v = (s.transpose(-3, -2).to(exact) for s in (query, key, value))
        k, v = (s.repeat_interleave(q.shape[-3] // s.shape[-3], -3) for s in (k, v))
        scores = q @ k.transpose(-2, -1) * block.scale
        if block.softcap is not None:
            scores = (scores / block.softcap).tanh() * block.softcap
        hidden = block.hidden
        if block.diagonal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return (scores if hidden is None else scores.masked_fill(hidden, float("-inf"))), q, k, v


class CudaFlash:
    """PyTorch's flash attention for GPUs, 16-bit formats."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        if REGISTERED.name is not None:
            heads = _heads(query, key)
            make = partial(block_trial, heads, self, block)
            REGISTERED.admit(("block", *heads, block.diagonal), query.device, query.dtype, make)
        states = (_heads_first(s) for s in (query, key, value))
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            *states, 0.0, block.diagonal, False, scale=block.scale
        )
        return output[0].transpose(0, 1), lse[0]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, block: Block
    ) -> QkvGradients:
        given = [_heads_first(s) for s in (grad, query, key, value, output)]
        none = torch.empty(0, dtype=torch.long, device=query.device)
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *given,
            lse[None].contiguous(),
            None,
            None,
            len(query),
            len(key),
            0.0,
            block.diagonal,
            none,
            none,
            scale=block.scale,
        )
        query_, key_, value_ = (g[0].transpose(0, 1) for g in gradients)
        return query_, key_, value_


def _heads(query: Tensor, key: Tensor) -> tuple[int, int, int]:
    """How many heads queries and keys have, and their width."""
    return query.shape[1], key.shape[1], query.shape[2]


def _heads_first(states: Tensor) -> Tensor:
    """[tokens, heads, dim] → [1, heads, tokens, dim]."""
    return states.transpose(0, 1)[None]


FLASH_ATTENTION_2 = "flash_attention_2"  # an attention_backend
_MULTIPLE = 8  # a head's width must be a multiple of it
_UNBOUNDED = (-1, -1)


def require_package(key: str) -> None:
    """Raises ConfigError where the package that `key`=flash_attention_2 asks for is not here. No GPU is touched."""
    _, obstacle = flash_attention_package()
    if obstacle is not None:
        raise _refusal(key, obstacle)


def require(key: str, device: torch.device) -> None:
    """Raises ConfigError where a part with `key`=flash_attention_2 cannot compute with it on this device."""
    extra = find_extra(FLASH_ATTENTION)
    if extra.obstacle is not None:
        raise _refusal(key, extra.obstacle)
    if device.type != "cuda":
        raise _refusal(key, f"its kernels run on GPUs, and the part computes on {device.type}")
    try:
        _package()
    except (ImportError, OSError) as error:  # built for another torch
        raise _refusal(key, f"flash-attn {extra.version} cannot be loaded: {error}") from error


def _refusal(key: str, why: str) -> ConfigError:
    return ConfigError(
        f"{key}={FLASH_ATTENTION_2}: {why}. Set {key}=auto, PyTorch's own kernels, which have flash attention in them, "
        "or make flash-attn usable on each node: `python -m dhp doctor machine` says what is missing."
    )


@cache
def _package() -> ModuleType:
    from flash_attn import flash_attn_interface

    return flash_attn_interface


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    causal: bool,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """See `dhp.parallel.attention.attention_kernels.attend_varlen`."""
    return _package().flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scale,
        causal=causal,
        window_size=_UNBOUNDED if window is None or not causal else (window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


class FlashAttention2:
    """One block of a ring: see `dhp.parallel.attention.attention_kernels.Kernel`."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        states = [_filled(s) for s in (query, key, value)]
        output, lse, *_ = _package()._flash_attn_varlen_forward(
            *states, **_varlen_arguments(query, key, block), return_softmax=False, block_table=None
        )
        return output[..., : query.shape[-1]], lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, block: Block
    ) -> QkvGradients:
        given = [_filled(s) for s in (grad, query, key, value, output)]
        gradients = [torch.empty_like(s) for s in given[1:4]]
        _package()._flash_attn_varlen_backward(
            *given,
            lse.contiguous(),
            *gradients,
            **_varlen_arguments(query, key, block),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        query_, key_, value_ = (g[..., : query.shape[-1]] for g in gradients)
        return query_, key_, value_


def _varlen_arguments(query: Tensor, key: Tensor, block: Block) -> dict[str, Any]:
    """Arguments of both directions for one segment."""
    # Made on the device: a copy of numbers from the host would hold it up.
    bounds = (torch.arange(2, dtype=torch.int32, device=s.device) * len(s) for s in (query, key))
    return {
        **dict(zip(("cu_seqlens_q", "cu_seqlens_k"), bounds, strict=True)),
        "max_seqlen_q": len(query),
        "max_seqlen_k": len(key),
        "dropout_p": 0.0,
        "softmax_scale": block.scale,
        "causal": block.diagonal,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
    }


def _filled(states: Tensor) -> Tensor:
    """Contiguous, and with zeros up to a width that the kernels have: they add nothing to a score."""
    return F.pad(states, (0, -states.shape[-1] % _MULTIPLE)).contiguous()


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a GPU check on a machine with an older PyTorch of its own
    varlen_attn: Any = lambda: None


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch has a kernel that takes segments of all lengths at once: flash attention, 16 bits on GPUs from
    Ampere on."""
    complete = {"window_size", "enable_gqa"} <= signature(varlen_attn).parameters.keys()
    sixteen = device.type == "cuda" and dtype.itemsize == 2
    return sixteen and complete and torch.cuda.get_device_capability(device) >= (8, 0)


def segment_kernel(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The name of what computes attention over segments of several lengths."""
    if backend == FLASH_ATTENTION_2:
        return FLASH_ATTENTION_2
    if not has_varlen(device, dtype):
        return "sdpa by length"
    name = REGISTERED.choose() if backend == AUTO else None
    return "varlen" if name is None else f"varlen by {name}"


def takes_varlen(query: Tensor) -> bool:
    """Whether that kernel takes heads of this width: flash attention has none wider than 256."""
    return query.shape[-1] <= 256


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    causal: bool,
    scale: float,
    window: int | None = None,
    backend: str = AUTO,
) -> Tensor:
    """Segments one behind another, each attending to itself: [tokens, heads, dim], keys maybe with fewer heads.

    bounds: int32 [segments + 1]. longest: tokens of the longest segment. window: tokens that each one sees of those up
    to itself, with causal attention. PyTorch's flash attention, or that of the package of its own, with gradients:
    unlike cuDNN it builds no plan for each new length, and nothing is sorted."""
    if backend == FLASH_ATTENTION_2:
        return attend(query, key, value, bounds, longest, causal, scale, window)
    if REGISTERED.name is not None:
        heads, windowed = _heads(query, key), window is not None
        kind = ("segments", *heads, causal, windowed)
        make = partial(segments_trial, heads, causal, windowed, _attend_varlen)
        REGISTERED.admit(kind, query.device, query.dtype, make)
    return _attend_varlen(query, key, value, bounds, longest, causal, scale, window)


def _attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    causal: bool,
    scale: float,
    window: int | None,
) -> Tensor:
    sizes = (-1 if window is None else window - 1, 0) if causal else (-1, -1)
    grouped = query.shape[1] != key.shape[1]
    return varlen_attn(
        query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=sizes, enable_gqa=grouped
    )


def choose_kernel(query: Tensor, backend: str = AUTO) -> Kernel:
    """The fastest kernel for tensors like this one, or that of the backend where it takes heads of this width."""
    if backend == FLASH_ATTENTION_2 and takes_varlen(query):
        return FlashAttention2()
    if query.device.type == "cpu":
        return CpuFlash()
    return CudaFlash() if query.dtype in (torch.float16, torch.bfloat16) else Dense()
