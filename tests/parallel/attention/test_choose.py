"""Attention of segments: chosen, merged, sampled."""

import sys
from collections import Counter
from inspect import signature
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dhp.core.batch import Sampling, TokenRange
from dhp.core.errors import ConfigError
from dhp.parallel import device
from dhp.parallel.attention import attention_kernels, segments
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
from dhp.parallel.attention.row_decode import (
    Chooser,
    NewToken,
    ShardedCacheIndex,
    ShardedKVCache,
    attend_cached,
    keep_likeliest,
    new_token_attention,
)
from dhp.parallel.attention.row_decode import merge as merge_of_row_decode
from dhp.parallel.attention.segment_plan import index_tensors, plan_segments, with_tensors
from dhp.parallel.attention.segments import attend_segments, segment_attention
from dhp.parallel.attention.shard_plan import contiguous_plan, zigzag_plan
from dhp.parallel.attention.visibility import PLAIN, LayerRule
from tests.helpers.figures import ROOT
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


LOGITS = torch.randn(50, generator=torch.Generator().manual_seed(2)) * 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 60])
@pytest.mark.parametrize("top_p", [0.01, 0.6, 1.0])
def test_what_is_kept_is_what_transformers_keeps(temperature: float, top_k: int, top_p: float) -> None:
    warpers = [TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    wanted = LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.long), LOGITS[None].clone())[0]
    found = keep_likeliest(LOGITS, Sampling(1, temperature=temperature, top_p=top_p, top_k=top_k))
    torch.testing.assert_close(found, wanted)


def test_tokens_come_as_often_as_their_shares_say() -> None:
    sampling = Sampling(1, temperature=1.3, top_k=5, seed=4)
    chooser, count = Chooser(sampling), 20_000
    found = Counter(int(chooser.choose(LOGITS)) for _ in range(count))
    shares = keep_likeliest(LOGITS, sampling).softmax(0)
    assert set(found) == set(shares.nonzero()[:, 0].tolist())
    assert all(abs(found[token] / count - float(shares[token])) < 0.015 for token in found)


def test_a_seed_says_the_draws() -> None:
    draw = lambda seed: [
        int(chooser.choose(LOGITS)) for chooser in [Chooser(Sampling(9, temperature=2.0, seed=seed))] * 9
    ]
    assert draw(1) == draw(1) != draw(2)
    assert int(Chooser(Sampling(1)).choose(LOGITS)) == int(LOGITS.argmax())


HEADS, DIM = 4, 8


def dense(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """[1, heads, tokens, dim] → [1, tokens, heads, dim], every token seeing its own segment, written out."""
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    scores = query @ key.transpose(-1, -2) * DIM**-0.5
    scores = scores.masked_fill(segment[:, None] != segment, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def segment_states(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(1, HEADS, tokens, DIM, dtype=torch.float64, generator=generator) for _ in range(4)]


def attend(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    plan = plan_segments(lengths, CPU)
    return segment_attention(torch.nn.Module(), query, key, value, None, scaling=DIM**-0.5, cu_seq_lens_q=plan)[0]


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [1, 7, 1, 3, 7], [16, 8, 16, 8, 4]])
def test_segments_equal_dense_attention(lengths: list[int]) -> None:
    *qkv, weight = segment_states(sum(lengths))
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
    query, key, value, weight = (s[0].transpose(0, 1) for s in segment_states(tokens))  # [tokens, heads, dim]
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


TOKENS, PARTIAL_HEADS, KV, WIDTH = 11, 6, 2, 8


def partial_states(value_width: int = WIDTH) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    make = lambda tokens, heads, width: torch.randn(tokens, heads, width, generator=draws, dtype=torch.float64) * 2
    return make(1, PARTIAL_HEADS, WIDTH), make(TOKENS, KV, WIDTH), make(TOKENS, KV, value_width)


def written_out(query: Tensor, key: Tensor, value: Tensor, softcap: float | None = None) -> Tensor:
    key, value = (one.repeat_interleave(PARTIAL_HEADS // KV, 1) for one in (key, value))
    scores = torch.einsum("hd,khd->hk", query[0], key) * 0.3
    scores = scores if softcap is None else (scores / softcap).tanh() * softcap
    return torch.einsum("hk,khd->hd", scores.softmax(-1), value)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("value_width", [WIDTH, 5])
@pytest.mark.parametrize("parts", [[11], [4, 7], [0, 11], [5, 0, 6], [1] * 11])
def test_parts_merged_are_the_whole(parts: list[int], value_width: int, softcap: float | None) -> None:
    query, key, value = partial_states(value_width)
    pairs = zip(key.split(parts), value.split(parts), strict=True)
    found = [attend_cached(query, k, v, 0.3, LayerRule(softcap=softcap)) for k, v in pairs]
    merged = merge_of_row_decode(*(torch.stack(list(one)) for one in zip(*found, strict=True)))
    torch.testing.assert_close(merged, written_out(query, key, value, softcap), rtol=0, atol=1e-14)


def test_without_keys_nothing_is_seen() -> None:
    query, key, value = partial_states(5)
    output, lse = attend_cached(query, key[:0], value[:0], 0.3, PLAIN)
    assert output.shape == (PARTIAL_HEADS, 5) and not output.any() and bool((lse == float("-inf")).all())


class Layer(torch.nn.Module):
    """An attention layer of transformers as far as anybody asks it. types: of the layers."""

    def __init__(self, kind: str):
        super().__init__()
        self.layer_idx = 0
        self.config = type("Config", (), {"layer_types": [kind], "attention_chunk_size": 4})


@pytest.mark.parametrize(
    ("kind", "window", "seen"),
    [
        ("full_attention", None, range(0, 11)),
        ("sliding_attention", 3, range(8, 11)),
        ("chunked_attention", None, range(8, 11)),
    ],
)
def test_windows_and_chunks_are_the_last_tokens_of_the_row(kind: str, window: int | None, seen: range) -> None:
    """The new token is the row's eleventh, of which this rank has some."""
    query, key, value = partial_states()
    places = [0, 1, 4, 5, 6, 8, 10]
    plan = NewToken(ShardedCacheIndex(places, 10, 0, 2, 0), None)
    own = torch.tensor(places)
    given = (s.transpose(0, 1)[None] for s in (query, key[own], value[own]))
    output, _ = new_token_attention(Layer(kind), *given, None, 0.3, plan, sliding_window=window)
    kept = torch.tensor([place for place in places if place in seen])
    torch.testing.assert_close(output[0, 0], written_out(query, key[kept], value[kept]), rtol=0, atol=1e-14)


def test_the_cache_keeps_what_is_its_own() -> None:
    """Two ranks; five tokens of a prompt, of which this one has the first and the last two; then new ones in turn."""
    cache = ShardedKVCache(1, ShardedCacheIndex([0, 3, 4], 5, 1, 2, room=3))
    layer, make = cache.layers[0], lambda tokens, value: torch.full((1, KV, tokens, WIDTH), float(value))
    given = make(3, 1)
    assert layer.update(given, given)[0] is given and cache.get_seq_length() == 0
    lengths, kept = [], []
    for number in range(3):
        with cache.held.growing():
            keys, _ = layer.update(make(1, 10 + number), make(1, 10 + number))
            kept.append(keys[0, 0, :, 0].tolist())
        lengths.append(cache.get_seq_length())
    assert kept == [[1, 1, 1, 10], [1, 1, 1, 10], [1, 1, 1, 10, 12]]
    assert lengths == [6, 7, 8] and cache.held.places == [0, 3, 4, 5, 7]
    assert cache.bytes == 2 * 5 * KV * WIDTH * 4


def test_a_rank_without_tokens_keeps_none_of_its_dummy() -> None:
    cache = ShardedKVCache(1, ShardedCacheIndex([], 1, 1, 2, room=2))
    dummy = torch.ones(1, KV, 1, WIDTH)
    cache.layers[0].update(dummy, dummy)
    assert cache.bytes == 0
    with cache.held.growing():
        keys, _ = cache.layers[0].update(dummy * 2, dummy * 2)
    assert keys.shape[-2] == 1 and float(keys[0, 0, 0, 0]) == 2.0


ZIGZAG = """\
ring 0 ulysses 0  aaaa........aaaabbbbbbbb........................................  16 tokens
ring 0 ulysses 1  ........................bbbb........................bbbbbbbbbbbb  16 tokens
ring 1 ulysses 0  ....aaaaaaaa................bbbbbbbb............................  16 tokens
ring 1 ulysses 1  ....................................bbbbbbbbbbbbbbbb............  16 tokens"""


def test_a_zigzag_of_two_segments_on_two_by_two_ranks() -> None:
    """Each ring rank has the first and last quarter of each segment, or the two between; the page shows the same."""
    assert zigzag_plan([16, 48], 2, 2).draw() == ZIGZAG
    assert ZIGZAG in (ROOT / "docs" / "developers" / "attention.md").read_text(encoding="utf-8")


def test_a_column_shows_its_first_token() -> None:
    drawn = contiguous_plan([3000, 1000], 1, 2).draw(width=8)
    assert drawn == "ring 0 ulysses 0  aaaa....  2,000 tokens\nring 0 ulysses 1  ....aabb  2,000 tokens"


def test_nothing_is_held_of_an_empty_sequence() -> None:
    assert contiguous_plan([], 1, 1).draw() == "ring 0 ulysses 0    0 tokens"
