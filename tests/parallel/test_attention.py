"""Segment attention against dense attention with a mask, on one rank; over several: test_sharded_attention.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dhp.parallel import attention
from dhp.parallel.attention import attend_segments, plan_segments, segment_attention

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
    monkeypatch.setattr(attention, "_must_repeat", lambda query: repeated)
    tokens = sum(lengths)
    query, key, value, weight = (s[0].transpose(0, 1) for s in states(tokens))  # [tokens, heads, dim]
    key, value = key[:, :kv_heads], value[:, :kv_heads]
    ours, theirs = ([s.clone().requires_grad_() for s in (query, key, value)] for _ in range(2))
    output = attend_segments(*ours, plan_segments(lengths, CPU, causal=True), DIM**-0.5)
    q, k, v = (s.transpose(0, 1) for s in theirs)  # [heads, tokens, dim]
    k, v = (s.repeat_interleave(HEADS // kv_heads, 0) for s in (k, v))
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(tokens)
    hidden = (segment[:, None] != segment) | (place[:, None] < place)
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
