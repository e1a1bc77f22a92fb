"""What flash-attn 2.7 and newer has, by plain math: the same names, arguments and results, as far as dhp calls them."""

from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import Tensor


def flash_attn_interface(calls: list[str]) -> SimpleNamespace:
    """The module. calls: to which the name of each function that is called is added."""

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        deterministic: bool,
    ) -> Tensor:
        calls.append("flash_attn_varlen_func")
        _check(cu_seqlens_q, max_seqlen_q)
        _check(cu_seqlens_k, max_seqlen_k)
        return _attend(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size)[0]

    def _flash_attn_varlen_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: None,
        return_softmax: bool,
        block_table: None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        calls.append("_flash_attn_varlen_forward")
        _check_kernel(cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k, q, k, v)
        window = (window_size_left, window_size_right)
        output, lse = _attend(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window)
        return output, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_varlen_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: None,
        deterministic: bool,
    ) -> Tensor:
        calls.append("_flash_attn_varlen_backward")
        _check_kernel(cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k, dout, q, k, v, out, softmax_lse)
        assert len(cu_seqlens_q) == 2  # one segment, as its formulas here are for
        group = q.shape[1] // k.shape[1]
        queries, keys, values, slopes, outputs = (
            s.transpose(0, 1) for s in (q, *(s.repeat_interleave(group, 1) for s in (k, v)), dout, out)
        )
        scores = queries @ keys.transpose(1, 2) * softmax_scale
        weights = (scores.masked_fill(~_seen(scores, causal, (-1, -1)), float("-inf")) - softmax_lse[..., None]).exp()
        inner = weights * (slopes @ values.transpose(1, 2) - (slopes * outputs).sum(-1, keepdim=True)) * softmax_scale
        shared = lambda s: s.unflatten(0, (-1, group)).sum(1).transpose(0, 1)
        dq.copy_((inner @ keys).transpose(0, 1))
        dk.copy_(shared(inner.transpose(1, 2) @ queries))
        dv.copy_(shared(weights.transpose(1, 2) @ slopes))
        return (slopes * outputs).sum(-1)

    own = (flash_attn_varlen_func, _flash_attn_varlen_forward, _flash_attn_varlen_backward)
    return SimpleNamespace(**{function.__name__: function for function in own})


def _check(bounds: Tensor, longest: int) -> None:
    assert bounds.dtype == torch.int32 and int(bounds.diff().max()) == longest


def _check_kernel(queries: Tensor, longest: int, keys: Tensor, longest_key: int, *states: Tensor) -> None:
    _check(queries, longest)
    _check(keys, longest_key)
    assert all(s.is_contiguous() for s in states)
    assert all(s.shape[-1] % 8 == 0 for s in states if s.ndim == 3)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, scale: float, causal: bool, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Output [tokens, heads, dim] and log-sum-exp [heads, tokens], segment by segment."""
    outputs, sums = [], []
    group = q.shape[1] // k.shape[1]
    for (begin, end), (first, last) in zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True):
        own_k, own_v = (s[first:last].repeat_interleave(group, 1).transpose(0, 1) for s in (k, v))
        scores = q[begin:end].transpose(0, 1) @ own_k.transpose(1, 2) * scale
        scores = scores.masked_fill(~_seen(scores, causal, window), float("-inf"))
        outputs.append((scores.softmax(-1) @ own_v).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(sums, dim=1)


def _seen(scores: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
    """Which keys each query sees; places count from the end, as the package's do."""
    queries, keys = scores.shape[-2:]
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)  # of a key, how far behind
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen &= distance >= 0
    left, right = window
    if left >= 0:
        seen &= distance <= left
    if right >= 0:
        seen &= distance >= -right
    return seen
