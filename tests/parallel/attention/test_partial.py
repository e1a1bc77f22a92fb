"""A new token's attention over keys that lie on several ranks: as over all of them, written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dhp.parallel.attention.row_decode import (
    NewToken,
    ShardedCacheIndex,
    ShardedKVCache,
    attend_own,
    merge,
    new_token_attention,
)
from dhp.parallel.attention.visibility import PLAIN, LayerRule

TOKENS, HEADS, KV, WIDTH = 11, 6, 2, 8


def states(value_width: int = WIDTH) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    make = lambda tokens, heads, width: torch.randn(tokens, heads, width, generator=draws, dtype=torch.float64) * 2
    return make(1, HEADS, WIDTH), make(TOKENS, KV, WIDTH), make(TOKENS, KV, value_width)


def written_out(query: Tensor, key: Tensor, value: Tensor, softcap: float | None = None) -> Tensor:
    key, value = (one.repeat_interleave(HEADS // KV, 1) for one in (key, value))
    scores = torch.einsum("hd,khd->hk", query[0], key) * 0.3
    scores = scores if softcap is None else (scores / softcap).tanh() * softcap
    return torch.einsum("hk,khd->hd", scores.softmax(-1), value)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("value_width", [WIDTH, 5])
@pytest.mark.parametrize("parts", [[11], [4, 7], [0, 11], [5, 0, 6], [1] * 11])
def test_parts_merged_are_the_whole(parts: list[int], value_width: int, softcap: float | None) -> None:
    query, key, value = states(value_width)
    pairs = zip(key.split(parts), value.split(parts), strict=True)
    found = [attend_own(query, k, v, 0.3, LayerRule(softcap=softcap)) for k, v in pairs]
    merged = merge(*(torch.stack(list(one)) for one in zip(*found, strict=True)))
    torch.testing.assert_close(merged, written_out(query, key, value, softcap), rtol=0, atol=1e-14)


def test_without_keys_nothing_is_seen() -> None:
    query, key, value = states(5)
    output, lse = attend_own(query, key[:0], value[:0], 0.3, PLAIN)
    assert output.shape == (HEADS, 5) and not output.any() and bool((lse == float("-inf")).all())


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
    query, key, value = states()
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
