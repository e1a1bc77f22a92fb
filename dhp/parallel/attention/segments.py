"""Runs attention over segments of a row."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dhp.core.heads import share_heads
from dhp.parallel.attention.attention_kernels import attend_varlen, takes_varlen
from dhp.parallel.attention.ring import Ring, ring_attention
from dhp.parallel.attention.segment_plan import SegmentPlan, Ulysses
from dhp.parallel.attention.visibility import (
    PLAIN,
    Band,
    KeyRange,
    LayerRule,
    attend_band,
    blocks_apply,
    check_position_scales,
    layer_rule,
)

States = tuple[Tensor, Tensor, Tensor]


def attend_whole(states: States, plan: SegmentPlan, scale: float, layer: LayerRule) -> list[Tensor]:
    """Outputs of the segments that are here whole, which the states [tokens, heads, dim] begin with, in their order."""
    if not plan.groups:
        return []
    spans = plan.spans if blocks_apply(plan.block_rule, layer) else ()
    longest = max(length for length, _ in plan.groups)
    layer = layer.within(longest)
    solid = all(span.solid for group in spans for span in group)
    if layer.softcap is not None or (spans and (layer.bounds or not solid)):
        return list(_attend_bands(states, plan, scale, layer, spans))
    if plan.bounds is not None and takes_varlen(states[0]):
        query, key, value = (_begin(s, plan.whole) for s in states)
        bounds = plan.bounds if layer.chunk is None else _cut(plan, layer.chunk)
        longest = min(longest, layer.chunk or longest)
        rule = (bounds, longest, plan.causal, scale, layer.window)
        outputs = [attend_varlen(query, key, value, *rule, backend=plan.backend)]
    else:
        outputs = [_attend_group(group, plan.causal, scale, layer) for group in _groups(states, plan)]
    return [_look_ahead(outputs, states, plan, scale, spans)] if spans else outputs


def _begin(states: Tensor, count: int) -> Tensor:
    """The first `count` of them; all of them as they are, whose gradient then needs no copy."""
    return states if len(states) == count else states[:count]


def _groups(states: States, plan: SegmentPlan) -> Iterator[States]:
    """Query, key and value of each group, [segments, tokens, heads, dim]."""
    sizes = [length * count for length, count in plan.groups]
    parts = (_begin(s, plan.whole).split(sizes) for s in states)
    for (length, count), *group in zip(plan.groups, *parts, strict=True):
        query, key, value = (s.reshape(count, length, *s.shape[1:]) for s in group)
        yield query, key, value


def _attend_group(group: States, causal: bool, scale: float, layer: LayerRule) -> Tensor:
    """Segments of one length, [segments, tokens, heads, dim] → [segments × tokens, heads, dim]."""
    count, length = group[0].shape[:2]
    if layer.window is not None and layer.window < length:
        return attend_band(*group, Band(length, causal, layer), scale).flatten(0, 1)
    if layer.chunk is not None and layer.chunk < length:
        return _attend_chunks(group, causal, scale, layer.chunk)
    q, k, v = (s.transpose(1, 2) for s in group)  # [segments, heads, tokens, dim]
    grouped = q.shape[1] != k.shape[1]
    if grouped and must_repeat(q):
        k, v = (s.repeat_interleave(q.shape[1] // s.shape[1], dim=1) for s in (k, v))
        grouped = False
    if q.is_meta:  # where torch would write out the scores, which no kernel saves
        attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)[0]
    else:
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    return attended.transpose(1, 2).flatten(0, 1)


def _attend_chunks(group: States, causal: bool, scale: float, chunk: int) -> Tensor:
    """As `_attend_group`, each chunk of a segment by itself."""
    count, length = group[0].shape[:2]
    full = length - length % chunk
    outputs = []
    for part in (slice(0, full), slice(full, length)):
        if part.start == part.stop:
            continue
        size = min(chunk, part.stop - part.start)
        query, key, value = (s[:, part].reshape(-1, size, *s.shape[2:]) for s in group)
        attended = _attend_group((query, key, value), causal, scale, LayerRule())
        outputs.append(attended.view(count, part.stop - part.start, *attended.shape[1:]))
    return torch.cat(outputs, dim=1).flatten(0, 1)


def _attend_bands(
    states: States, plan: SegmentPlan, scale: float, layer: LayerRule, spans: Sequence[Sequence[KeyRange]]
) -> Iterator[Tensor]:
    """Outputs group by group where scores are masked or capped."""
    numbers = _block_numbers(plan) if spans else [None] * len(plan.groups)
    for at, ((length, _), group) in enumerate(zip(plan.groups, _groups(states, plan), strict=True)):
        # Whatever the group's own length: a window that bounds the past alone says less than none for short segments.
        mine = spans[at] if spans else ()
        blocks = numbers[at] if mine else None
        band = Band(length, plan.causal, layer, blocks, mine, plan.block_rule)
        yield attend_band(*group, band, scale).flatten(0, 1)


def _block_numbers(plan: SegmentPlan) -> list[Tensor | None]:
    """The number of each token's block by group, [segments, tokens]."""
    assert plan.blocks is not None
    numbers = plan.blocks if plan.order is None else plan.blocks[plan.order]
    parts = numbers[: plan.whole].split([length * count for length, count in plan.groups])
    return [part.view(count, length) for (length, count), part in zip(plan.groups, parts, strict=True)]


def _look_ahead(
    outputs: Sequence[Tensor], states: States, plan: SegmentPlan, scale: float, spans: Sequence[Sequence[KeyRange]]
) -> Tensor:
    """`outputs` of causal attention as one, with the rows of blocks recomputed: they see all up to the last of theirs.

    So attention to whole segments needs no mask. Each block is contiguous."""
    starts = accumulate((length * count for length, count in plan.groups), initial=0)
    rows = []  # (first row of the segment, of the block, the one behind it)
    for (length, _), start, group in zip(plan.groups, starts, spans):
        for span in sorted(group):
            begin = start + span.segment * length
            rows.append((begin, begin + span.first, begin + span.end))
    output = outputs[0] if len(outputs) == 1 else torch.cat(list(outputs))
    edges = [0, *(row for _, first, end in rows for row in (first, end)), len(output)]
    parts = list(output.split([end - begin for begin, end in zip(edges, edges[1:])]))
    for number, (begin, first, end) in enumerate(rows):
        query, key, value = states
        part = (query[None, first:end], key[None, begin:end], value[None, begin:end])
        parts[2 * number + 1] = _attend_group(part, False, scale, LayerRule())
    return torch.cat(parts)


def _cut(plan: SegmentPlan, chunk: int) -> Tensor:
    """Bounds of the chunks of all segments, made where the segments' are: the host does not wait for the device."""
    assert plan.bounds is not None
    bounds = plan.bounds.long()
    pieces = (bounds.diff() + chunk - 1) // chunk
    total = sum(-(-length // chunk) * count for length, count in plan.groups)
    first = (pieces.cumsum(0) - pieces).repeat_interleave(pieces, output_size=total)
    number = torch.arange(total, device=bounds.device) - first
    starts = bounds[:-1].repeat_interleave(pieces, output_size=total) + number * chunk
    return torch.cat([starts, bounds[-1:]]).to(torch.int32)


def must_repeat(query: Tensor) -> bool:
    """Whether key/value heads must be repeated: on GPUs only 16-bit kernels share them, others build tokens²."""
    return query.is_cuda and query.dtype.itemsize > 2


def attend_segments(
    query: Tensor, key: Tensor, value: Tensor, plan: SegmentPlan, scale: float, layer: LayerRule = PLAIN
) -> Tensor:
    """Each token of [tokens, heads, dim] attends to its own segment; the same shape back, as wide as `value`.

    Key and value may have fewer heads, each shared by as many query heads in a row (grouped-query attention), and value
    may be of another width (multi-head latent attention). Raises ValueError for a window or chunk without causality."""
    if layer.bounds and not plan.causal:
        raise ValueError(f"window={layer.window}, chunk={layer.chunk}: segments that are not causal have neither")
    width, wanted = value.shape[-1], max(query.shape[-1], value.shape[-1])
    # All as wide as the widest: zeros add nothing to a score, and no fast kernel takes two widths.
    query, key, value = (s if s.shape[-1] == wanted else _widened(s, wanted) for s in (query, key, value))
    if plan.order is not None:
        query, key, value = (states[plan.order] for states in (query, key, value))
    outputs = attend_whole((query, key, value), plan, scale, layer)
    if plan.rest is not None:
        begin = plan.whole
        outputs.append(_attend_rest(query[begin:], key[begin:], value[begin:], plan.rest, scale, layer))
    output = outputs[0] if len(outputs) == 1 else torch.cat([query[:0], *outputs])  # none at all on an empty rank
    output = output if plan.inverse is None else output[plan.inverse]
    return output if width == wanted else output[..., :width]


def _widened(states: Tensor, width: int) -> Tensor:
    return F.pad(states, (0, width - states.shape[-1]))


def _attend_rest(
    query: Tensor, key: Tensor, value: Tensor, rest: Ulysses | Ring, scale: float, layer: LayerRule
) -> Tensor:
    if isinstance(rest, Ring):
        return ring_attention(query, key, value, rest, scale, layer)
    shares = share_heads(query.shape[1], key.shape[1], rest.exchange.degree)
    states = rest.exchange.heads_to_rank(query, key, value, shares)
    return rest.exchange.tokens_to_rank(attend_segments(*states, rest.plan, scale, layer), shares)


def segment_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cu_seq_lens_q: SegmentPlan | Tensor,
    segments: SegmentPlan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: states [1, heads, tokens, dim], output [1, tokens, heads, dim].

    `cu_seq_lens_q` carries our plan through the untouched tower, in place of cumulative lengths; `segments` does where
    the tower needs the lengths themselves."""
    plan = cu_seq_lens_q if segments is None else segments
    assert isinstance(plan, SegmentPlan)
    # [tokens, heads, dim]. As views all through: the gradient of an index is a whole tensor of zeros, filled in.
    states = (s.squeeze(0).transpose(0, 1) for s in (query, key, value))
    return attend_segments(*states, plan, scaling)[None], None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    segments: SegmentPlan,
    **named: Any,
) -> tuple[Tensor, None]:
    """Attention of a decoder's layer in transformers' terms, for one packed row or for several padded ones, to which
    `segments` carries the plan: states [rows, heads, tokens, dim], output [rows, tokens, heads, dim].

    It is a keyword of the model's forward that reaches every layer as it is. No mask of tokens × tokens is built. What
    else a layer asks for is in `named`. Raises ModelError for what is not computed here
    (`dhp.parallel.attention.visibility.layer_rule`)."""
    rows, _, tokens, width = query.shape
    layer = layer_rule(module, attention_mask, named)
    check_position_scales(module, tokens, rows == 1 and segments.groups != ((tokens, 1),))
    states = (s.transpose(1, 2).flatten(0, 1) for s in (query, key, value))
    output = attend_segments(*states, segments, width**-0.5 if scaling is None else scaling, layer)
    return output.unflatten(0, (rows, tokens)), None
