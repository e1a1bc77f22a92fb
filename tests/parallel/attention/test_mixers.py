"""Layers that carry state along a row: packed rows, and rows shared over ranks, equal samples alone."""

import inspect
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AttentionInterface,
    Lfm2Config,
    Lfm2Model,
    Qwen3_5TextConfig,
    Qwen3_5TextModel,
    Qwen3NextConfig,
    Qwen3NextModel,
)
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.lfm2_moe import modeling_lfm2_moe
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from dhp.core.errors import ModelError
from dhp.models.mixers import DELTA_NETS, SHORT_CONVOLUTIONS
from dhp.models.types import LayerParts
from dhp.parallel.attention import segments as whole
from dhp.parallel.attention.mixers import CHUNK, SHARED, run_by_segment
from dhp.parallel.attention.segment_plan import (
    MeshPosition,
    PassingRanks,
    RowRanks,
    SegmentPlan,
    Ulysses,
    plan_row,
    plan_segments,
    plan_shard,
)
from dhp.parallel.attention.segments import packed_attention
from dhp.parallel.attention.shard_plan import ShardPlan, contiguous_plan, given_plan, zigzag_plan
from dhp.parallel.recompute.recomputed_layers import ATTENTION, RecomputedLayers
from dhp.parallel.recompute.saved_tensors import save_output
from tests.helpers.double import (
    CPU,
    PACKED,
    SMALL,
    alone,
    largest_error,
    make_decoder,
    packed,
    samples_of,
    stay_in_double,
)
from tests.helpers.ranks import run_on_ranks
from tests.helpers.rows import slow


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_double(monkeypatch)


STATE_LENGTHS = (5, 9, 2, 5, 1, 70)  # shorter than the convolution; longer than a chunk of the delta rule, which is 64
LINEAR = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}


def qwen3_5(**changes: int) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
    return make_decoder(Qwen3_5TextModel, Qwen3_5TextConfig(**SMALL | LINEAR | changes, rope_parameters=rope))


def one_head() -> Any:
    """Fewer than any ranks."""
    return qwen3_5(linear_num_value_heads=1, linear_num_key_heads=1)


def qwen3_next() -> Any:
    experts = {"num_experts": 0, "mlp_only_layers": [0, 1, 2]}
    return make_decoder(Qwen3NextModel, Qwen3NextConfig(**SMALL, **LINEAR, **experts))


def lfm2() -> Any:
    types = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
    small = {name: value for name, value in SMALL.items() if name != "head_dim"}
    return make_decoder(Lfm2Model, Lfm2Config(**small, **types))


MIXERS = {qwen3_5: "Qwen3_5GatedDeltaNet", qwen3_next: "Qwen3NextGatedDeltaNet", lfm2: "Lfm2ShortConv"}


@pytest.mark.parametrize("make", MIXERS)
def test_a_packed_row_equals_each_sample_alone_of_stateful_layers(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = make(), samples_of(STATE_LENGTHS)
    wanted = alone(model, samples)
    leaking = packed(model, samples)
    assert largest_error(leaking, wanted) > 1e-2  # state runs from sample to sample
    assert run_by_segment(model, [MIXERS[make]]) == 2
    assert largest_error(packed(model, samples), wanted) < 1e-11
    monkeypatch.setattr(whole, "takes_varlen", lambda query: False)
    assert largest_error(packed(model, samples, varlen=True), wanted) < 1e-11  # the plan's segments in their own order


@pytest.mark.parametrize("make", MIXERS)
@pytest.mark.parametrize("choice", ["all", "linear", "light"])
def test_recomputed_layers_equal_the_same(make: Any, choice: str) -> None:
    model, samples = make(), samples_of(STATE_LENGTHS[:4])
    wanted = alone(model, samples)
    run_by_segment(model, [MIXERS[make]])
    RecomputedLayers(model.layers, LayerParts("layers", (), (), ("causal",) * 3), (choice,) * 3)
    assert largest_error(packed(model, samples, save_output(ATTENTION, packed_attention)), wanted) < 1e-11


@pytest.mark.parametrize("make", MIXERS)
def test_padded_rows_run_as_they_are(make: Any) -> None:
    model, (tokens,) = make(), samples_of((12,))
    rows, plan = tokens.view(2, 6), plan_segments((6, 6), torch.device("cpu"), causal=True)
    wanted = model(input_ids=rows, use_cache=False).last_hidden_state
    run_by_segment(model, [MIXERS[make]])
    assert torch.equal(model(input_ids=rows, use_cache=False, segments=plan).last_hidden_state, wanted)


def test_calls_beside_those_of_its_segments_change_nothing() -> None:
    """A rank makes as many calls as the others, whose segments are more."""
    model, found = lfm2(), []
    run_by_segment(model, ["Lfm2ShortConv"])
    plan = plan_segments((2, 3), torch.device("cpu"), causal=True)
    for calls in (0, 5):
        states = torch.linspace(-1.0, 1.0, 120, dtype=torch.float64).view(1, 5, 24).requires_grad_()
        output = model.layers[0].conv(states, segments=replace(plan, calls=calls))
        output.square().sum().backward()
        found.append((output, states.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) and one.abs().max() > 0


def test_a_class_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match="Lfm2Model has no module of the class Lfm2LongConv"):
        run_by_segment(lfm2(), ["Lfm2ShortConv", "Lfm2LongConv"])


def test_what_would_let_state_run_on_is_refused() -> None:
    model = lfm2()
    run_by_segment(model, ["Lfm2ShortConv"])
    mixer, states = model.layers[0].conv, torch.zeros(1, 5, 24, dtype=torch.float64)
    plan = plan_segments((2, 3), torch.device("cpu"), causal=True)
    divided = SegmentPlan((), None, None, True, rest=object())  # type: ignore[arg-type]
    for named, message in (
        ({}, "layers.0.conv: .* without `segments`"),
        ({"segments": divided}, "divided over ranks"),
        ({"segments": plan, "attention_mask": torch.ones(1, 5)}, "a mask"),
        ({"segments": plan, "cache": object()}, "a cache"),
        ({"segments": plan, "past_key_values": object()}, "a cache"),
    ):
        with pytest.raises(ModelError, match=message):
            mixer(states, **named)


LAYOUTS = {
    "ulysses": (contiguous_plan, 1, 2),
    "zigzag": (zigzag_plan, 2, 1),
    "both": (zigzag_plan, 2, 2),
    "uneven": (lambda lengths, ring, _: given_plan(lengths, (60, 1, 7, 24), ring), 1, 4),
}


def _errors(size: int) -> dict[tuple[str, str, str, str], float]:
    """By model, layout of so many ranks and way: the largest error of a row that they share, and of it with a fault."""
    ways = {
        "exchanged": {"": lambda row: row, "one sample": _one_sample, "out of order": _out_of_order},
        "passed": {"": lambda row: row, "no border": _no_border, "no state": _no_state, "other piece": _other_piece},
    }
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        stay_in_double(patch)
        for make, (layout, (plan, ring, ulysses)), way in product((qwen3_5, lfm2, one_head), LAYOUTS.items(), ways):
            if ring * ulysses == size and (make is not one_head or (way == "passed" and 1 in (ring, ulysses))):
                mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
                shards, position = plan(STATE_LENGTHS, ring, ulysses), MeshPosition.of(mesh)
                ranks = _row_ranks(position, ring, size, way)
                for fault, spoil in ways[way].items():
                    if make is qwen3_5 or not fault or (make is lfm2 and fault not in ("no state", "other piece")):
                        found[make.__name__, layout, way, fault] = _shared_error(make(), shards, position, ranks, spoil)
                whole = plan((sum(STATE_LENGTHS),), ring, ulysses)  # one sample
                error = _shared_error(make(), whole, position, ranks, ways[way][""])
                found[make.__name__, layout, way, ""] = max(error, found[make.__name__, layout, way, ""])
    return found


def _row_ranks(position: MeshPosition, ring: int, size: int, way: str) -> RowRanks:
    rank = dist.get_rank()
    if way == "exchanged":
        return RowRanks(dist.group.WORLD, rank)
    if 1 < ring < size:
        passing = PassingRanks(position.ring_group, position.ring_rank, ring)
        return RowRanks(position.ulysses_group, position.ulysses_rank, passing=passing, border=3)
    return RowRanks(None, 0, passing=PassingRanks(dist.group.WORLD, rank, size), border=3)


def _one_sample(row: Ulysses) -> Ulysses:
    """State and convolution run from sample to sample."""
    return replace(row, plan=replace(row.plan, groups=((sum(STATE_LENGTHS), 1),)))


def _out_of_order(row: Ulysses) -> Ulysses:
    """Tokens stay rank by rank: borders are missing, or a piece's state comes to another one."""
    order = torch.arange(sum(STATE_LENGTHS)).roll(1)
    return replace(row, plan=replace(row.plan, order=order, inverse=torch.argsort(order)))


def _no_border(row: Ulysses) -> Ulysses:
    """Zeros stand before each piece."""
    assert row.passing is not None and row.plan.order is not None
    tokens, coming = row.exchange.rank_tokens, sum(row.passing.receives)
    zeros = row.plan.order.where(row.plan.order < sum(tokens), sum(tokens) + coming)
    return replace(row, plan=replace(row.plan, order=zeros))


def _no_state(row: Ulysses) -> Ulysses:
    """Each piece begins as if nothing were before it."""
    assert row.passing is not None
    every = tuple(number for numbers in row.passing.chains for number in numbers)
    return replace(row, passing=replace(row.passing, chains=(every,)))


def _other_piece(row: Ulysses) -> Ulysses:
    """The state behind a segment's first piece comes to another one than the second."""
    assert row.passing is not None
    first, second, *others = row.passing.chains
    chains = (first, second[1:] + second[:1], *others) if len(second) > 1 else (second, first, *others)
    return replace(row, passing=replace(row.passing, chains=chains))


def _shared_error(model: Any, shards: ShardPlan, position: MeshPosition, ranks: RowRanks, spoil: Any) -> float:
    wanted = alone(model, samples_of(shards.lengths))
    output, own = _shared(model, shards, position, spoil(plan_row(shards, ranks, CPU)))
    weight = torch.randn(wanted[0].shape, dtype=output.dtype, generator=torch.Generator().manual_seed(7))
    gradients = torch.autograd.grad((output * weight[own]).sum(), list(model.parameters()))
    for gradient in gradients:
        dist.all_reduce(gradient)
    return largest_error([output, *gradients], [wanted[0][own], *wanted[1:]])


def _shared(model: Any, shards: ShardPlan, position: MeshPosition, row: Ulysses) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model makes of this rank's tokens, and their places in the row."""
    run_by_segment(model, {type(module).__name__ for module in model.modules()} & set(SHARED))
    AttentionInterface.register(PACKED, packed_attention)
    model.config._attn_implementation_internal = PACKED
    own = torch.tensor(shards.positions(position.ring_rank, position.ulysses_rank), dtype=torch.long)
    places = torch.cat([torch.arange(length) for length in shards.lengths])[own][None]
    segments = replace(plan_shard(shards, position, CPU, True), row=row)
    tokens = torch.cat(samples_of(shards.lengths), 1)[:, own]
    named = {"position_ids": places, "use_cache": False, "segments": segments}
    return model(input_ids=tokens, **named).last_hidden_state[0], own


@pytest.mark.parametrize("size", [2, slow(4)])
def test_a_row_that_ranks_share_equals_each_sample_alone(size: int) -> None:
    """Gradients too; and faults of the kinds that such layers invite are seen."""
    of_ranks = run_on_ranks(_errors, size, size)
    assert {layout for _, layout, *_ in of_ranks[0]} == {name for name, (_, *of) in LAYOUTS.items() if prod(of) == size}
    for case in of_ranks[0]:
        error = max(errors[case] for errors in of_ranks)
        assert (error < 1e-9) if not case[3] else (error > 1e-2), (case, error)


def _rounding(size: int) -> dict[str, float]:
    """By way: the error of 16 bits in a row's outputs, in the mean, on this rank."""
    samples, rank = samples_of((150, 90, 400)), dist.get_rank()
    shards = zigzag_plan([sample.shape[1] for sample in samples], size, 1)
    position = MeshPosition.of(init_device_mesh("cpu", (size, 1), mesh_dim_names=("ring", "ulysses")))
    with pytest.MonkeyPatch.context() as patch:
        stay_in_double(patch)
        wanted = alone(qwen3_5(), samples)[0][shards.positions(rank, 0)]
    found = {}
    for way in ("exchanged", "passed"):
        ranks = _row_ranks(position, size, size, way)
        output, _ = _shared(qwen3_5().bfloat16(), shards, position, plan_row(shards, ranks, CPU))
        found[way] = float((output.double() - wanted).norm())
    return found


def test_state_that_is_passed_on_rounds_as_a_whole_row_does() -> None:
    of_ranks = run_on_ranks(_rounding, 2, 2)
    exchanged, passed = (sum(errors[way] ** 2 for errors in of_ranks) ** 0.5 for way in ("exchanged", "passed"))
    assert 0 < passed < 1.25 * exchanged


def test_outputs_are_those_of_tokens_and_not_of_their_copies() -> None:
    """Of a row so long that threads share the making of its plan: a token's copies see what comes before them twice."""
    lengths = [1 + 37 * number % 700 for number in range(900)]
    shards, ranks = zigzag_plan(lengths, 2, 1), RowRanks(None, 0)
    plan = plan_row(shards, ranks, CPU, CHUNK).plan
    places = torch.tensor(shards.positions(0, 0) + shards.positions(1, 0))
    first = torch.cat([torch.arange(length) for length in lengths])
    behind = torch.cat([torch.arange(length).repeat(count) for length, count in plan.groups])
    assert plan.order is not None and plan.inverse is not None
    assert torch.equal(plan.order[plan.inverse], torch.arange(sum(lengths)))
    assert torch.equal(behind[plan.inverse], first[places])
    assert all(length % CHUNK == 0 for length, _ in plan.groups) and len(plan.groups) == 11


def test_each_class_that_ranks_share_has_heads_to_share() -> None:
    assert SHARED.keys() == {*DELTA_NETS, *SHORT_CONVOLUTIONS}


@pytest.mark.parametrize(
    ("own", "tried"),
    [
        (modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet, modeling_qwen3_5.Qwen3_5GatedDeltaNet),
        (modeling_lfm2_moe.Lfm2MoeShortConv, modeling_lfm2.Lfm2ShortConv),
    ],
)
def test_classes_of_models_with_experts_compute_the_same(own: type, tried: type) -> None:
    """Those that are tried above: their rows are shared in the same way."""
    assert inspect.getsource(own.forward) == inspect.getsource(tried.forward)
    assert SHARED[own.__name__] is SHARED[tried.__name__]
