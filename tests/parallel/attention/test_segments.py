"""Segment attention against dense attention with a mask, on one rank; over several: test_sharded_attention.py."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dhp.parallel.attention import attention_kernels, segments
from dhp.parallel.attention.segment_plan import index_tensors, plan_segments, with_tensors
from dhp.parallel.attention.segments import attend_segments, segment_attention

HEADS, DIM = 4, 8
CPU = torch.device("cpu")


def dense(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """[1, heads, tokens, dim] → [1, tokens, heads, dim], every token seeing its own segment, written out."""
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    scores = query @ key.transpose(-1, -2) * DIM**-0.5
    scores = scores.masked_fill(segment[:, None] != segment, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def states(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(1, HEADS, tokens, DIM, dtype=torch.float64, generator=generator) for _ in range(4)]


def attend(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    plan = plan_segments(lengths, CPU)
    return segment_attention(torch.nn.Module(), query, key, value, None, scaling=DIM**-0.5, cu_seq_lens_q=plan)[0]


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [1, 7, 1, 3, 7], [16, 8, 16, 8, 4]])
def test_segments_equal_dense_attention(lengths: list[int]) -> None:
    *qkv, weight = states(sum(lengths))
    ours, theirs = ([s.clone().requires_grad_() for s in qkv] for _ in range(2))
    output, expected = attend(*ours, lengths), dense(*theirs, lengths)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    weight = weight.transpose(1, 2)
    (output * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("repeated", [False, True])  # True: as on a GPU in float32
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [1, 7, 1, 3, 7]])
def test_causal_segments_with_shared_keys_equal_dense_attention(
    lengths: list[int], kv_heads: int, repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "must_repeat", lambda query: repeated)
    tokens = sum(lengths)
    query, key, value, weight = (s[0].transpose(0, 1) for s in states(tokens))  # [tokens, heads, dim]
    key, value = key[:, :kv_heads], value[:, :kv_heads]
    ours, theirs = ([s.clone().requires_grad_() for s in (query, key, value)] for _ in range(2))
    output = attend_segments(*ours, plan_segments(lengths, CPU, causal=True), DIM**-0.5)
    q, k, v = (s.transpose(0, 1) for s in theirs)  # [heads, tokens, dim]
    k, v = (s.repeat_interleave(HEADS // kv_heads, 0) for s in (k, v))
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    token = torch.arange(tokens)
    hidden = (segment[:, None] != segment) | (token[:, None] < token)
    scores = (q @ k.transpose(1, 2) * DIM**-0.5).masked_fill(hidden, float("-inf"))
    expected = (scores.softmax(-1) @ v).transpose(0, 1)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    (output * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_equal_lengths_need_no_reordering() -> None:
    assert plan_segments([4, 4, 4], CPU).order is None
    assert plan_segments([4, 4, 2], CPU).order is None
    mixed = plan_segments([4, 2, 4], CPU)
    assert mixed.order.tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 4, 5]
    assert mixed.groups == ((4, 2), (2, 1))


def _one_call(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *rest: Any, **named: Any) -> Tensor:
    """What the kernel for all segments at once computes, written out; it runs on GPUs alone."""
    (_, longest, _), window, grouped = rest, named["window_size"], named["enable_gqa"]
    assert bounds.dtype == torch.int32 and longest == int(bounds.diff().max())
    parts = []
    for begin, end in zip(bounds.tolist(), bounds.tolist()[1:]):
        q, k, v = (s[begin:end].transpose(0, 1)[None] for s in (query, key, value))
        causal = window == (-1, 0)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=named["scale"], enable_gqa=grouped)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("lengths", [[4, 4, 2, 4], [7], [1, 5, 1], [3, 3, 3]])
@pytest.mark.parametrize("causal", [False, True])
def test_one_call_for_all_segments_needs_no_order(
    lengths: list[int], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "varlen_attn", _one_call)
    torch.manual_seed(0)
    query = torch.randn(sum(lengths), 4, DIM, dtype=torch.float64)
    key, value = torch.randn(2, sum(lengths), 2, DIM, dtype=torch.float64)
    plan = plan_segments(lengths, CPU, causal, varlen=True)
    assert plan.order is None and plan.bounds.tolist() == [0, *accumulate(lengths)]
    found = attend_segments(query, key, value, plan, 0.3)
    wanted = attend_segments(query, key, value, plan_segments(lengths, CPU, causal), 0.3)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_pytorch_without_the_kernel_takes_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, sixteen = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not attention_kernels.has_varlen(cuda, sixteen)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert attention_kernels.has_varlen(cuda, sixteen)
    assert not attention_kernels.has_varlen(cuda, torch.float32) and not attention_kernels.has_varlen(CPU, sixteen)
    monkeypatch.setattr(attention_kernels, "varlen_attn", lambda query, key, value, is_causal: None)
    assert not attention_kernels.has_varlen(cuda, sixteen)


def test_plans_that_have_moved_are_the_same_plans() -> None:
    plans = [plan_segments([4, 2, 4], CPU), plan_segments([4, 2, 4], CPU, varlen=True), plan_segments([5], CPU)]
    moved = iter([tensor.clone().long() for plan in plans for tensor in index_tensors(plan)])
    for plan, other in zip(plans, [with_tensors(plan, moved) for plan in plans], strict=True):
        assert (plan.groups, plan.causal) == (other.groups, other.causal)
        pairs = zip(index_tensors(plan), index_tensors(other), strict=True)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
    assert next(moved, None) is None
