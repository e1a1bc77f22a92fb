"""Visibility between tokens: as data, as masks, in attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dhp.core.errors import ModelError
from dhp.parallel.attention.attention_kernels import Block, Dense

# How blocks, whose tokens see each other both ways, go with a layer's window. With `near` for "inside the window and
# the chunk", of which the window bounds the past alone:
#   bounded   near and (causal or block), in all layers: Gemma 3
#   windowed  the same in layers that have a window, causal alone in the others: Gemma 4
#   free      (near and causal) or block, in all layers: PaliGemma's prefix
BlockRule = Literal["bounded", "windowed", "free"]

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
# What layers hand on to attention that changes nothing here: positions are in query and key already.
_HARMLESS = frozenset({"position_ids", "position_embeddings", "cache_position", "use_cache", "num_items_in_batch"})
_HARMLESS_VALUES: Mapping[str, Any] = {
    "dropout": 0.0,
    "is_causal": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
}


@dataclass(frozen=True)
class LayerRule:
    """How one layer's attention differs from causal attention inside a segment.

    window: a token sees itself and the `window - 1` tokens before it. chunk: a token sees those of its own chunk of so
    many tokens, counted from the start of the segment. softcap: scores s become tanh(s / softcap) × softcap."""

    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None

    @property
    def bounds(self) -> bool:
        """Whether there is a window or a chunk."""
        return self.window is not None or self.chunk is not None

    def within(self, longest: int) -> LayerRule:
        """The same rule for segments of at most `longest` tokens: without what none of them is long enough for."""
        window = self.window if self.window is not None and self.window < longest else None
        chunk = self.chunk if self.chunk is not None and self.chunk < longest else None
        return replace(self, window=window, chunk=chunk)

    def first_key(self, query: int) -> int:
        """The first token of the segment that token `query` sees, blocks aside."""
        since_window = 0 if self.window is None else query - self.window + 1
        since_chunk = 0 if self.chunk is None else query - query % self.chunk
        return max(0, since_window, since_chunk)


PLAIN = LayerRule()


class KeyRange(NamedTuple):
    """A block of a segment: the number of the segment in its group; the block's first token in the segment, and the one
    behind its last; whether all tokens between are the block's."""

    segment: int
    first: int
    end: int
    solid: bool


def check_blocks(blocks: Tensor, rule: str, tokens: int, causal: bool) -> None:
    """Raises ValueError for a name that is no rule, and for blocks that do not fit the segments."""
    if rule not in get_args(BlockRule):
        raise ValueError(f"unknown rule of blocks {rule!r}; give one of {', '.join(get_args(BlockRule))}")
    if not causal or blocks.shape != (tokens,):
        raise ValueError(
            f"blocks of shape {tuple(blocks.shape)} for {tokens} tokens, causal={causal}: give one number for each "
            "token of causal segments"
        )


def number_runs(inside: Tensor) -> Tensor:
    """Blocks of tokens that follow each other: int64 numbers of the runs of True, -1 elsewhere; any shape, flattened.

    A run over the end of a segment is a block in each of both."""
    flat = inside.flatten()
    begins = flat.clone()
    begins[1:] &= ~flat[:-1]
    return torch.where(flat, begins.cumsum(0) - 1, -1)


def blocks_apply(rule: BlockRule, layer: LayerRule) -> bool:
    """Whether blocks count in a layer."""
    return rule != "windowed" or layer.bounds


def find_spans(groups: Sequence[tuple[int, Sequence[int]]], blocks: Tensor) -> tuple[tuple[KeyRange, ...], ...]:
    """The blocks of more than one token, by group: (tokens of a segment, first rows of the segments). blocks: int64
    [rows], on the host."""
    return tuple(
        tuple(span for number, row in enumerate(rows) for span in _spans(number, blocks[row : row + length]))
        for length, rows in groups
    )


def _spans(segment: int, blocks: Tensor) -> Iterator[KeyRange]:
    """The blocks of one segment."""
    numbers, counts = (found.tolist() for found in blocks.unique_consecutive(return_counts=True))
    runs: dict[int, list[tuple[int, int]]] = {}
    at = 0
    for number, count in zip(numbers, counts, strict=True):
        if number >= 0:
            runs.setdefault(number, []).append((at, at + count))
        at += count
    spans = (KeyRange(segment, found[0][0], found[-1][1], len(found) == 1) for found in runs.values())
    yield from (span for span in spans if span.end - span.first > 1)


def sees(
    queries: range, keys: range, layer: LayerRule, causal: bool, device: torch.device, blocks: Tensor | None, rule: str
) -> Tensor:
    """Which keys each query sees, bool [queries, keys]: both are tokens of one segment by their place in it.

    blocks: of all tokens of several segments, int64 [segments, tokens]; the mask is then [segments, 1, queries, keys].
    """
    i = torch.arange(queries.start, queries.stop, device=device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=device)
    ahead = i >= j if causal else torch.ones_like(i >= j)
    near = torch.ones_like(ahead)
    if layer.window is not None:
        near &= j > i - layer.window
    if layer.chunk is not None:
        near &= i // layer.chunk == j // layer.chunk
    if blocks is None:
        return near & ahead
    own, other = blocks[:, queries.start : queries.stop, None], blocks[:, None, keys.start : keys.stop]
    together = (own == other) & (own >= 0)
    seen = (near & ahead) | together if rule == "free" else near & (ahead | together)
    return seen[:, None]


def layer_rule(module: torch.nn.Module, attention_mask: Tensor | None, named: Mapping[str, Any]) -> LayerRule:
    """The rule of the layer that `module` is the attention of, from the keywords it calls attention with.

    Raises ModelError, by name, for what would change the result and is not computed here."""
    if attention_mask is not None:
        shape = tuple(attention_mask.shape)
        raise _refusal(module, f"it hands over a mask {shape}", "what a token sees must follow from the segments")
    if getattr(module, "is_causal", True) is False:
        raise _refusal(module, "it is not causal (is_causal=False)", "segments of a decoder are causal")
    for name, value in named.items():
        known = name in ("sliding_window", "softcap") or name in _HARMLESS or value is None
        if not known and not (name in _HARMLESS_VALUES and value == _HARMLESS_VALUES[name]):
            shown = f"tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise _refusal(module, f"it hands over {name}={shown}", "that would be ignored, and the result be wrong")
    window = named.get("sliding_window")
    return LayerRule(window, _chunk(module, window), named.get("softcap"))


def check_position_scales(module: torch.nn.Module, tokens: int, packed: bool) -> None:
    """Raises ModelError where a layer scaled its queries by their place in a packed row, not in their segment.

    Llama 4 does so in layers without rotary positions, from the token `floor_scale` - 1 of a row on."""
    if not packed or not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return
    if tokens >= module.floor_scale:
        raise _refusal(
            module,
            f"it scales queries by their place in the row (attn_temperature_tuning, floor_scale={module.floor_scale}), "
            f"and a packed row has {tokens} tokens",
            "a sample's tokens would be scaled by the samples before it; set data.packing=false",
        )


def _chunk(module: torch.nn.Module, window: int | None) -> int | None:
    """Tokens of a chunk, by the configuration of the layer."""
    config = getattr(module, "config", None)
    types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if not types or index is None:
        return None
    kind = types[index]
    if kind not in _LAYER_TYPES:
        raise _refusal(module, f"layer {index} is of the type {kind!r}", f"known are {', '.join(_LAYER_TYPES)}")
    if kind == "sliding_attention" and window is None:
        raise _refusal(module, f"layer {index} slides, but sliding_window is None", "its window is not known")
    return config.attention_chunk_size if kind == "chunked_attention" else None


def _refusal(module: torch.nn.Module, what: str, why: str) -> ModelError:
    return ModelError(
        f"{type(module).__name__}: attention by segments cannot run this layer: {what}; {why}. "
        "Use a model whose layers do without."
    )


# Queries of one call. Under a window of w tokens each sees QUERIES / w more keys than it uses.
QUERIES = 256


@dataclass(frozen=True)
class Band:
    """Segments of one length in one layer, and what their tokens see.

    length: tokens of a segment. blocks: int64 [segments, tokens], numbers of blocks, None where none count; spans: the
    blocks by their places; block_rule: how they go with the layer's window."""

    length: int
    causal: bool
    layer: LayerRule
    blocks: Tensor | None = None
    spans: Sequence[KeyRange] = ()
    block_rule: BlockRule = "bounded"

    def tiles(self) -> Iterator[tuple[range, range]]:
        """Queries, and the keys that some of them see, by their places in the segment."""
        for begin in range(0, self.length, QUERIES):
            end = min(begin + QUERIES, self.length)
            first, last = self.layer.first_key(begin), end if self.causal else self.length
            for span in self.spans:
                if span.first < end and begin < span.end:
                    last = max(last, span.end)
                    first = min(first, span.first) if self.block_rule == "free" else first
            yield range(begin, end), range(first, last)

    def sees(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """See `dhp.parallel.attention.visibility.sees`."""
        return sees(queries, keys, self.layer, self.causal, device, self.blocks, self.block_rule)


def attend_band(query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float) -> Tensor:
    """Each token of [segments, tokens, heads, dim] attends to what the band lets it see; same shape back.

    Key and value may have fewer heads."""
    if band.layer.softcap is not None:
        return _Capped.apply(query, key, value, band, scale)
    grouped = query.shape[2] != key.shape[2]
    q, k, v = (s.transpose(1, 2) for s in (query, key, value))
    if grouped and query.is_cuda:  # on GPUs no kernel with a mask shares keys
        k, v = (s.repeat_interleave(q.shape[1] // s.shape[1], dim=1) for s in (k, v))
        grouped = False
    outputs = []
    for rows, columns in band.tiles():
        seen = band.sees(rows, columns, query.device)
        k_, v_ = (s[:, :, columns.start : columns.stop] for s in (k, v))
        q_ = q[:, :, rows.start : rows.stop]
        attended = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=seen, scale=scale, enable_gqa=grouped)
        outputs.append(attended.transpose(1, 2))
    return torch.cat(outputs, dim=1)


class _Capped(torch.autograd.Function):
    """Attention with scores written out, which soft caps need; backward computes them again, some queries at a time."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float) -> Tensor:
        parts = [Dense().forward(*states, block) for _, _, *states, block in _blocks(query, key, value, band, scale)]
        output, lse = torch.cat([part for part, _ in parts], dim=1), torch.cat([part for _, part in parts], dim=2)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.band, ctx.scale = band, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        grads = [torch.zeros_like(s, dtype=lse.dtype) for s in (query, key, value)]
        for rows, columns, q, k, v, block in _blocks(query, key, value, ctx.band, ctx.scale):
            # In the exact format, because several blocks of queries add to a key's gradient.
            exact = (s.to(lse.dtype) for s in (q, k, v))
            parts = Dense().backward(grad[:, rows], *exact, output[:, rows], lse[:, :, rows], block)
            for whole, at, part in zip(grads, (rows, columns, columns), parts, strict=True):
                whole[:, at] += part
        grad_query, grad_key, grad_value = (g.to(query.dtype) for g in grads)
        return grad_query, grad_key, grad_value, None, None


def _blocks(query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float) -> Iterator[tuple[Any, ...]]:
    """The tiles: of each, rows of queries, rows of keys, query, key, value, and how they see each other."""
    for queries, keys in band.tiles():
        rows, columns = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        hidden = ~band.sees(queries, keys, query.device)
        block = Block(False, scale, hidden, band.layer.softcap)
        yield rows, columns, query[:, rows], key[:, columns], value[:, columns], block
