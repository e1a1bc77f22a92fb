"""Windows, chunks, blocks and soft caps against attention with an explicit mask, in float64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dhp.core.errors import ModelError
from dhp.parallel.attention import attention_kernels, segments
from dhp.parallel.attention import visibility as banded
from dhp.parallel.attention.segment_plan import SegmentPlan, index_tensors, plan_segments, with_tensors
from dhp.parallel.attention.segments import attend_segments
from dhp.parallel.attention.visibility import PLAIN, LayerRule, layer_rule
from tests.helpers.visibility import dense_attention, dense_mask, random_states

CPU = torch.device("cpu")
SCALE = 0.4
LENGTHS = (9, 23, 1, 9, 4)
# Blocks at the start, in the middle, at the end and of one token; two beside each other; in segments of one length each
# elsewhere; one in two pieces; the same number in two segments.
BLOCKS = (
    [0, 0, 0, -1, -1, 1, 1, -1, -1],
    [-1, -1, 2, 2, 2, 2, 3, 3, 3, -1, 4, -1, -1, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5],
    [6],
    [-1, 1, 1, 1, 1, -1, -1, -1, 8],
    [-1, 9, 9, -1],
)
LAYERS = [
    PLAIN,
    *(LayerRule(window=w) for w in (1, 3, 4, 9, 22, 23, 100)),
    *(LayerRule(chunk=c) for c in (1, 4, 9, 23)),
    LayerRule(window=3, chunk=5),
    LayerRule(softcap=0.7),
    LayerRule(3, None, 0.7),
    LayerRule(None, 4, 0.7),
]


def numbers(split: bool = False) -> Tensor:
    """BLOCKS in a row. split: with one block in two pieces."""
    flat = [number for segment in BLOCKS for number in segment]
    if split:
        flat[9 + 6 : 9 + 9] = [2, -1, 2]
    return torch.tensor(flat)


def results(attend: Callable[..., Tensor], states: Sequence[Tensor]) -> list[Tensor]:
    """Output, and gradients of query, key and value."""
    *qkv, grad = states
    leaves = [s.clone().requires_grad_() for s in qkv]
    output = attend(*leaves)
    output.backward(grad.to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest deviation, relative to the largest value of its tensor; a gradient that is zero has none."""
    pairs = zip(found, wanted, strict=True)
    return max(float((mine - other).abs().max() / other.abs().max().clamp(min=0.1)) for mine, other in pairs)


def ours(plan: SegmentPlan, layer: LayerRule = PLAIN) -> Callable[..., Tensor]:
    return lambda query, key, value: attend_segments(query, key, value, plan, SCALE, layer)


def masked(seen: Tensor, layer: LayerRule = PLAIN) -> Callable[..., Tensor]:
    return lambda query, key, value: dense_attention(query, key, value, seen, SCALE, layer.softcap)


def deviation(
    lengths: Sequence[int],
    layer: LayerRule,
    plan: SegmentPlan,
    blocks: Tensor | None = None,
    rule: str = "",
    shape: tuple[int, ...] = (4, 2, 8, 8),
) -> float:
    states = random_states(sum(lengths), *shape)
    seen = dense_mask(lengths, layer, None if blocks is None else blocks.tolist(), rule)
    return error(results(ours(plan, layer), states), results(masked(seen, layer), states))


@pytest.fixture(params=[256, 4, 3])
def queries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many queries a call: all of a segment, or several calls."""
    monkeypatch.setattr(banded, "QUERIES", request.param)


@pytest.mark.usefixtures("queries")
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_layers_equal_attention_with_a_mask(layer: LayerRule) -> None:
    for lengths in (LENGTHS, (7,), (9, 9, 9)):
        assert deviation(lengths, layer, plan_segments(lengths, CPU, causal=True)) < 1e-12, lengths


@pytest.mark.usefixtures("queries")
@pytest.mark.parametrize("rule", ["bounded", "windowed", "free"])
@pytest.mark.parametrize("split", [False, True])
def test_blocks_equal_attention_with_a_mask(rule: Any, split: bool) -> None:
    blocks = numbers(split)
    plan = plan_segments(LENGTHS, CPU, causal=True, blocks=blocks, block_rule=rule)
    found = {layer: deviation(LENGTHS, layer, plan, blocks, rule) for layer in LAYERS}
    assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_heads_that_share_keys(heads: int, kv_heads: int) -> None:
    blocks = numbers()
    plan = plan_segments(LENGTHS, CPU, causal=True, blocks=blocks)
    for layer in (PLAIN, LayerRule(window=3), LayerRule(softcap=0.5)):
        assert deviation(LENGTHS, layer, plan, blocks, "bounded", (heads, kv_heads, 8, 8)) < 1e-12, layer


def test_a_window_off_by_one_is_noticed() -> None:
    states = random_states(sum(LENGTHS), 4, 2, 8, 8)
    seen = dense_mask(LENGTHS, LayerRule(window=4))
    wanted = results(masked(seen), states)
    plan = plan_segments(LENGTHS, CPU, causal=True)
    for window in (3, 5):
        assert error(results(ours(plan, LayerRule(window=window)), states), wanted) > 1e-2


def test_each_rule_of_blocks_is_another() -> None:
    masks = [dense_mask(LENGTHS, LayerRule(window=3), numbers().tolist(), rule) for rule in ("bounded", "free")]
    masks += [dense_mask(LENGTHS, PLAIN, numbers().tolist(), rule) for rule in ("bounded", "windowed")]
    assert not torch.equal(*masks[:2]) and not torch.equal(*masks[2:])


@pytest.mark.parametrize("layer", [PLAIN, LayerRule(window=3), LayerRule(chunk=4), LayerRule(softcap=0.7)], ids=str)
@pytest.mark.parametrize("width", [5, 12])
def test_values_of_another_width(layer: LayerRule, width: int) -> None:
    plan = plan_segments(LENGTHS, CPU, causal=True)
    assert deviation(LENGTHS, layer, plan, shape=(4, 2, 8, width)) < 1e-12
    assert deviation(LENGTHS, layer, plan, shape=(4, 4, 12, width)) < 1e-12


def test_a_segment_of_more_queries_than_a_call_has() -> None:
    """Of the real size, and longer than the keys that a kernel takes at once."""
    lengths = (1300, 40)
    blocks = torch.full((1340,), -1)
    blocks[250:520], blocks[1000:1290] = 0, 1
    plan = plan_segments(lengths, CPU, causal=True, blocks=blocks)
    states = random_states(1340, 2, 1, 8, 8)
    i, j = torch.arange(1340)[:, None], torch.arange(1340)
    same = (i < 1300) == (j < 1300)
    block = (blocks[:, None] == blocks) & (blocks >= 0)
    for window in (700, None):
        seen = same & ((j <= i) | block) & (torch.tensor(True) if window is None else j > i - window)
        wanted = results(masked(seen), states)
        assert error(results(ours(plan, LayerRule(window=window)), states), wanted) < 1e-12


def test_no_call_has_more_keys_than_its_queries_see(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = F.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
        calls.append((query.shape[2], key.shape[2]))
        return real(query, key, value, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    blocks = torch.full((4000,), -1)
    blocks[1000:1100] = 0
    plan = plan_segments((4000,), CPU, causal=True, blocks=blocks)
    states = random_states(4000, 1, 1, 4, 4)[:3]
    attend_segments(*states, plan, SCALE, LayerRule(window=300))
    assert all(q <= 256 and k <= 256 + 299 + 100 for q, k in calls)
    calls.clear()
    attend_segments(*states, plan, SCALE, LayerRule(window=4000))
    assert calls == [(4000, 4000), (100, 1100)]  # causal without a mask, and the block's own


def test_what_has_no_effect_takes_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    real = F.scaled_dot_product_attention
    watched = lambda *states, attn_mask=None, **named: masks.append(attn_mask) or real(*states, **named)
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    states = random_states(sum(LENGTHS), 4, 2, 8, 8)[:3]
    plain = attend_segments(*states, plan_segments(LENGTHS, CPU, causal=True), SCALE)
    alone = plan_segments(LENGTHS, CPU, causal=True, blocks=torch.arange(sum(LENGTHS)))  # blocks of one token
    assert alone.blocks is None
    calls = len(masks)
    for plan, layer in product((alone,), (LayerRule(window=23), LayerRule(chunk=23), LayerRule(99, 99))):
        assert torch.equal(attend_segments(*states, plan, SCALE, layer), plain)
    assert len(masks) == 4 * calls and all(mask is None for mask in masks)


def _kernel(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *_: Any, **named: Any) -> Tensor:
    """What the kernel for all segments at once computes, written out; it runs on GPUs alone."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256 and bounds.dtype == torch.int32
    left, right = named["window_size"]
    assert right == 0
    lengths = bounds.diff().tolist()
    longest = _[1]
    assert longest == max(lengths)
    seen = dense_mask(lengths, LayerRule(window=None if left < 0 else left + 1))
    return dense_attention(query, key, value, seen, named["scale"])


@pytest.mark.parametrize("lengths", [LENGTHS, (7,), (3, 3, 3), (8, 4, 8)])
def test_one_call_for_all_segments(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "varlen_attn", _kernel)
    plan = plan_segments(lengths, CPU, causal=True, varlen=True)
    assert plan.order is None
    for layer in LAYERS:
        assert deviation(lengths, layer, plan, shape=(4, 2, 8, 6)) < 1e-12, layer
    if lengths == LENGTHS:
        plan = plan_segments(lengths, CPU, causal=True, varlen=True, blocks=numbers(), block_rule="free")
        for layer in LAYERS:
            assert deviation(lengths, layer, plan, numbers(), "free") < 1e-12, layer


def test_heads_too_wide_for_the_kernel_take_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "varlen_attn", _kernel)
    plan = plan_segments((3, 5, 5), CPU, causal=True, varlen=True)
    assert plan.groups == ((3, 1), (5, 2))
    assert deviation((3, 5, 5), LayerRule(window=2), plan, shape=(1, 1, 320, 320)) < 1e-12


def test_bounds_of_chunks() -> None:
    plan = plan_segments((9, 4, 1, 8), CPU, causal=True, varlen=True)
    assert segments._cut(plan, 4).tolist() == [0, 4, 8, 9, 13, 14, 18, 22]


def test_plans_with_blocks_that_have_moved_are_the_same() -> None:
    plan = plan_segments((4, 2, 4), CPU, causal=True, blocks=torch.tensor([0, 0, -1, -1, 0, 0, -1, 1, 1, -1]))
    moved = with_tensors(plan, iter([tensor.clone() for tensor in index_tensors(plan)]))
    assert len(index_tensors(plan)) == 3 and torch.equal(moved.blocks, plan.blocks) and moved.blocks is not plan.blocks
    assert moved.spans == plan.spans == (((0, 0, 2, True), (1, 1, 3, True)), ((0, 0, 2, True),))


def test_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown rule of blocks 'open'; give one of bounded, windowed, free"):
        plan_segments((3,), CPU, causal=True, blocks=torch.zeros(3, dtype=torch.long), block_rule="open")
    for blocks, causal in ((torch.zeros(4, dtype=torch.long), True), (torch.zeros(3, dtype=torch.long), False)):
        with pytest.raises(ValueError, match="for 3 tokens"):
            plan_segments((3,), CPU, causal=causal, blocks=blocks)


@pytest.mark.parametrize("layer", [LayerRule(window=2), LayerRule(chunk=2)])
def test_windows_and_chunks_without_causality_are_refused(layer: LayerRule) -> None:
    states = random_states(4, 1, 1, 4, 4)[:3]
    with pytest.raises(ValueError, match="not causal"):
        attend_segments(*states, plan_segments((4,), CPU), SCALE, layer)


class _Layer(torch.nn.Module):
    layer_idx = 1

    def __init__(self, kind: str = "full_attention", **named: Any):
        super().__init__()
        self.config = type("Config", (), {"layer_types": ["full_attention", kind], "attention_chunk_size": 7})
        for name, value in named.items():
            setattr(self, name, value)


def test_a_layer_says_its_rule() -> None:
    harmless = {"dropout": 0.0, "position_ids": torch.zeros(1), "use_cache": False, "is_causal": True, "s_aux": None}
    assert layer_rule(_Layer(), None, harmless) == PLAIN
    assert layer_rule(torch.nn.Module(), None, {"sliding_window": 4, "softcap": 3.0}) == LayerRule(4, None, 3.0)
    assert layer_rule(_Layer("chunked_attention"), None, {}) == LayerRule(chunk=7)
    assert layer_rule(_Layer("sliding_attention"), None, {"sliding_window": 4}) == LayerRule(4)


REFUSED: list[tuple[_Layer, Any, dict[str, Any], str]] = [
    (_Layer(), torch.zeros(1, 1, 2, 2), {}, r"a mask \(1, 1, 2, 2\)"),
    (_Layer(), None, {"dropout": 0.1}, "dropout=0.1"),
    (_Layer(), None, {"s_aux": torch.zeros(4)}, r"s_aux=tensor \(4,\)"),
    (_Layer(), None, {"is_causal": False}, "is_causal=False"),
    (_Layer(is_causal=False), None, {}, "is_causal=False"),
    (_Layer(), None, {"position_bias": torch.zeros(1)}, "position_bias"),
    (_Layer(), None, {"cu_seq_lens_q": torch.zeros(3)}, "cu_seq_lens_q"),
    (_Layer("indexed_attention"), None, {}, "layer 1 is of the type 'indexed_attention'"),
    (_Layer("sliding_attention"), None, {}, "layer 1 slides, but sliding_window is None"),
]


@pytest.mark.parametrize(("module", "mask", "named", "message"), REFUSED, ids=[case[3] for case in REFUSED])
def test_what_is_not_known_is_refused_by_name(module: Any, mask: Any, named: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        layer_rule(module, mask, named)


def test_rules_are_for_the_longest_segment() -> None:
    layer = LayerRule(5, 7, 0.5)
    assert layer.within(6) == replace(layer, chunk=None) and layer.within(5) == LayerRule(softcap=0.5)
    firsts = [layer.first_key(query) for query in range(16)]
    assert all(later >= sooner for sooner, later in pairwise(firsts)) and firsts[6:9] == [2, 7, 7]
