"""Bytes of rows and states, traced and by formula."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP, Qwen2MLP

from dhp.config.schema import LoraConfig, PartConfig
from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED
from dhp.core.errors import ConfigError, ModelError
from dhp.core.graph import StageSpec
from dhp.core.parameters import AdapterSettings
from dhp.core.reports import RecomputePolicies, StageUsage
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.text_engine import TextEngine
from dhp.models.family import Family
from dhp.models.registry import load_family
from dhp.models.shape import HeldParameter, PartShape, sum_shape
from dhp.plan.count.row_bytes import (
    CHOICES,
    PartBytes,
    RowBytes,
    Traced,
    TracedRows,
    layers_to_trace,
    of_all_layers,
    trace_bytes,
)
from dhp.plan.count.state_bytes import (
    RankBytes,
    Units,
    by_zero_stage,
    copied_bytes,
    gathered_moments,
    rank_bytes,
    runtime_bytes,
    stage_units,
)
from dhp.plan.count.traced import TraceSettings, check_draws, trace_moments, trace_part
from dhp.plan.recompute.profile import usage_of
from tests.helpers.families import Maker
from tests.helpers.layouts import Case, Fault, Running, make_reader, rules_of
from tests.helpers.rows import slow, slow_but
from tests.helpers.tiny import IMAGE_TOKEN, make_sample, save_llava_with_experts
from tests.helpers.tiny_families import FAMILIES, save_family

TEXT = (TracedRows(256, 64, 32), TracedRows(777, 192, 301))
TOWER = (TracedRows(0, patches=1024, windows=64), TracedRows(0, patches=64 * 48, windows=64))
DEEP = 18  # layers
ROWS = {"text": TEXT, "vision": TOWER}
TRACED = [
    (model, *form, part)
    for model, form, part in product(("made_model", "qwen3_vl_model"), (("bfloat16", 1), ("float32", 2)), ROWS)
]
QUICK = [("made_model", "bfloat16", 1, "text"), ("qwen3_vl_model", "float32", 2, "vision")]


def tracer(model: str, family: Family, part: str, dtype: str, tensor: int) -> Callable[..., Traced]:
    def trace(rows: TracedRows, choices: RecomputePolicies) -> Traced:
        return trace_moments(model, family, part, rows, TraceSettings(dtype, tensor, choices))

    return trace


def assert_equal(found: PartBytes, usage: StageUsage, rows: TracedRows) -> None:
    costs = found.costs(rows, range(len(usage.layers)))
    for at, layer in enumerate(usage.layers):
        own = costs.layer(at, layer.choice)
        assert (own.held_bytes, own.replay_bytes) == (layer.held_bytes, layer.replay_bytes), (at, layer)
    assert (costs.before_bytes, costs.after_bytes) == (usage.before_bytes, usage.after_bytes)
    total = sum(layer.held_bytes for layer in usage.layers)
    assert costs.held_bytes(usage.choices) == usage.before_bytes + total + usage.after_bytes


@pytest.mark.parametrize(("model", "dtype", "tensor", "part"), slow_but(TRACED, *QUICK))
def test_equal_to_a_trace(model: str, dtype: str, tensor: int, part: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(model)
    family = load_family(path)
    trace, (base, other) = tracer(path, family, part, dtype, tensor), ROWS[part]
    kinds = family.parts[part].layers.kinds
    found = trace_bytes(kinds, base, trace)
    for choice in CHOICES:
        assert_equal(found, trace(other, (choice,) * len(kinds)).usage, other)
    mixed = tuple(CHOICES[at % len(CHOICES)] for at in range(len(kinds)))
    assert_equal(found, trace(other, mixed).usage, other)


def deep(path: str, folder: Path) -> str:
    """A model of more layers than a trace has: its configuration alone."""
    values = json.loads((Path(path) / "config.json").read_text())
    text, vision = values["text_config"], values["vision_config"]
    text["num_hidden_layers"] = DEEP
    if "layer_types" in text:
        text["layer_types"] = ["full_attention"] * DEEP
    vision["depth"] = DEEP
    for key in ("fullatt_block_indexes", "deepstack_visual_indexes"):
        if key in vision:
            vision[key] = [1, 6, 10]
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize(("model", "dtype", "tensor", "part"), [slow(*row) for row in TRACED])
def test_some_layers_tell_of_all(
    model: str, dtype: str, tensor: int, part: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = deep(request.getfixturevalue(model), tmp_path)
    family = load_family(path)
    own, base = family.parts[part], ROWS[part][0]
    kinds = own.layers.kinds
    assert len(kinds) == DEEP
    whole = trace_bytes(kinds, base, tracer(path, family, part, dtype, tensor))
    stands = layers_to_trace(kinds, [*own.leaves.values(), *own.takes.values()])
    layers = sorted(set(stands.values()))
    assert len(layers) < len(kinds)

    def trace(rows: TracedRows, choices: RecomputePolicies) -> Traced:
        return trace_moments(path, family, part, rows, TraceSettings(dtype, tensor, choices, layers=layers))

    assert of_all_layers(trace_bytes([kinds[at] for at in layers], base, trace), stands) == whole


def test_layers_that_stand_for_others() -> None:
    """The first and the last one, and the neighbours of what leaves, are like no other; one in six is enough."""
    assert layers_to_trace("a" * 12) == {at: at if at < 6 or at == 11 else 5 for at in range(12)}
    apart = layers_to_trace("a" * 12, [7])
    assert [at for at, other in apart.items() if at == other] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 11]
    assert layers_to_trace("abab") == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_stage_keeps_what_its_first_layer_shares(made_model: str) -> None:
    family = load_family(made_model)
    kinds = family.decoder.layers.kinds
    found = trace_bytes(kinds, TEXT[0], tracer(made_model, family, "text", "bfloat16", 1))
    rows = TEXT[1]
    assert found.more[0].of(rows) > 0 and found.more[-1] == RowBytes()
    behind = found.costs(rows, [len(kinds) - 1])
    assert behind.before_bytes == 0 and behind.after_bytes == found.after.of(rows)
    alone = found.held[kinds[-1], "none"].of(rows) + found.more[0].of(rows)
    assert behind.layer(0, "none").held_bytes == alone


def test_what_is_kept_between_layers_counts_with_the_one_before(qwen3_vl_model: str) -> None:
    """Mergers of a tower's inner states run between its layers."""
    family = load_family(qwen3_vl_model)
    rows, count = TOWER[0], len(family.tower.layers.kinds)
    usage = tracer(qwen3_vl_model, family, "vision", "bfloat16", 1)(rows, ("none",) * count).usage
    held = [layer.held_bytes for layer in usage.layers]
    assert sum(held) + usage.before_bytes + usage.after_bytes == usage.peak_bytes
    inner = {layer for layer in family.tower.leaves.values() if layer < count - 1}
    assert inner and {at for at, own in enumerate(held) if own > held[-1]} >= inner


def spec(**degrees: int) -> StageSpec:
    split = Degrees(**degrees)
    return StageSpec("text", "text", (range(4),), split, True, range(split.world))


@pytest.mark.parametrize(
    ("dtype", "stage", "expected"),
    [
        ("float32", 0, (400, 400, 800)),
        ("float32", 1, (400, 400, 300)),
        ("float32", 2, (400, 100, 300)),
        ("float32", 3, (100, 100, 300)),  # DeepSpeed's optimizer updates a copy of the share
        ("bfloat16", 0, (200, 400, 1200)),
        ("bfloat16", 1, (200, 400, 300)),
        ("bfloat16", 2, (200, 100, 300)),
        ("bfloat16", 3, (50, 100, 300)),
    ],
)
def test_what_each_zero_stage_cuts(dtype: str, stage: int, expected: tuple[int, int, int]) -> None:
    part = PartConfig(num_actors=4, tensor=1, dtype=dtype, zero_stage=stage)
    assert rank_bytes(part, spec(data=4), PartShape(100, 100, 100)) == RankBytes(*expected)


def test_torch_keeps_a_share_of_the_weights_in_the_optimizers_format_alone() -> None:
    part = PartConfig(num_actors=8, tensor=2, data=4, dtype="bfloat16", zero_stage=3, zero_engine="fsdp")
    assert rank_bytes(part, spec(data=4, tensor=2), PartShape(200, 100, 0)) == RankBytes(
        0, 100, 300
    )  # 16 bytes of each of 25 elements
    whole = gathered_moments(part, PartShape(200, 100, 0), Units(10), 4)
    # Two layers' weights, a layer's gradients, and what is sent of them and comes of them, twice a quarter.
    assert whole.most == 2 * 10 * 2 + 10 * 2 + 10 * 4 + 2 * 10 * 4 / 4


def test_experts_are_cut_over_the_ranks_that_hold_the_same() -> None:
    """Of 100 numbers 60 are in experts, which two of four ranks hold alike: 10 and 30 of them are a rank's."""
    part = PartConfig(num_actors=4, tensor=1, data=4, expert=2, dtype="bfloat16", zero_stage=3, zero_engine="fsdp")
    shape, split = PartShape(160, 100, 40, experts=60), spec(data=4, expert=2)
    assert rank_bytes(part, split, shape) == RankBytes(0, 40 * 4, 40 * 12)
    assert rank_bytes(replace(part, zero_stage=2), split, shape) == RankBytes(200, 40 * 4, 40 * 12)
    assert copied_bytes(part, split, shape) == 40 * 2 + 40 * 12
    frozen = replace(shape, trained=40)  # all but experts
    assert rank_bytes(part, split, frozen) == RankBytes(30 * 2, 10 * 4, 10 * 12)
    assert rank_bytes(part, replace(split, trains=False), shape) == RankBytes(40 * 2, 0, 0)
    assert by_zero_stage(replace(part, ulysses=1, ring=1), split, shape) == {0: 1800, 1: None, 2: 840, 3: 640}
    # Two layers' weights, a layer's gradients, what is sent of them, and what comes: a half of the experts', a quarter.
    whole = gathered_moments(part, shape, Units(10, spread=16), 4)
    assert whole.most == 2 * 10 * 2 + 10 * 2 + 10 * 4 + 2 * (4 / 4 + 6 / 2) * 4


def test_a_stage_has_the_ends_of_its_part_where_it_has_their_layers() -> None:
    parameters = (7, 10, 20, 30, 5)  # before three layers, of each, and behind them
    assert stage_units(parameters, range(3)) == Units(30, 12, 5)
    assert stage_units(parameters, [0, 1]) == Units(20, 7, 0)
    assert stage_units(parameters, [0, 1], (7, 14, 29, 38, 5)) == Units(20, 7, 0, 29)
    assert stage_units(parameters, [1]) == Units(20, 0, 0) and stage_units(parameters, [2]) == Units(30, 5, 5)


@pytest.mark.parametrize(
    ("dtype", "zero_stage", "expected"),
    [
        ("bfloat16", 2, (200 + 40, 20, 60)),  # of 25 elements, of which 5 are trained: 20 in 2 bytes beside the whole
        ("bfloat16", 3, (40, 20, 60)),
        ("float32", 3, (80, 20, 60)),
    ],
)
def test_torch_keeps_shards_of_frozen_weights_too(dtype: str, zero_stage: int, expected: tuple[int, int, int]) -> None:
    part = PartConfig(num_actors=4, tensor=1, dtype=dtype, zero_stage=zero_stage, zero_engine="fsdp")
    assert rank_bytes(part, spec(data=4), PartShape(100, 100, 100, trained=20)) == RankBytes(*expected)


@pytest.mark.parametrize(
    ("nbytes", "zero_stage", "expected"),
    [
        (18, 0, (200, 400, 1200)),
        (16, 0, (200, 200, 1200)),
        (12, 0, (200, 400, 600)),  # compensation and two moments, 2 bytes each
        (10, 0, (200, 200, 600)),
        (16, 2, (200, 50, 300)),  # of 25 elements: sums, master weight, moments
        (12, 2, (200, 100, 200)),
        (16, 3, (0, 50, 300)),  # FSDP2 gathers the optimizer's copy
        (12, 3, (0, 100, 200)),
        (10, 3, (0, 50, 200)),
    ],
)
def test_what_each_form_of_states_takes(nbytes: int, zero_stage: int, expected: tuple[int, int, int]) -> None:
    part = PartConfig(
        num_actors=4, tensor=1, dtype="bfloat16", zero_stage=zero_stage, zero_engine="fsdp", state_bytes=nbytes
    )
    held = rank_bytes(part, spec(data=4), PartShape(100, 100, 100))
    assert held == RankBytes(*expected)
    assert zero_stage or held.total == 100 * nbytes
    assert by_zero_stage(replace(part, data=4), spec(data=4), PartShape(100, 100, 100))[zero_stage] == sum(expected)


@pytest.mark.parametrize(
    ("nbytes", "dtype", "expected"),
    [(18, "bfloat16", (0, 100, 100, 200)), (12, "bfloat16", (0, 100, 100, 100)), (18, "float32", (0, 100, 100, 200))],
)
def test_moments_in_host_memory_are_not_the_devices(
    nbytes: int, dtype: str, expected: tuple[int, int, int, int]
) -> None:
    part = PartConfig(num_actors=4, tensor=1, dtype=dtype, zero_stage=3, zero_engine="fsdp", state_bytes=nbytes)
    held = rank_bytes(replace(part, host_moments=True), spec(data=4), PartShape(100, 100, 100))
    assert held == RankBytes(*expected)
    assert held.total + held.host == rank_bytes(part, spec(data=4), PartShape(100, 100, 100)).total


def test_sums_in_16_bits_are_sent_so() -> None:
    part = PartConfig(num_actors=4, tensor=1, dtype="bfloat16", zero_stage=3, zero_engine="fsdp")
    shape = PartShape(100, 100, 100)
    moments = [gathered_moments(replace(part, state_bytes=own), shape, Units(10), 4) for own in (18, 16, 12, 10)]
    assert [one.most for one in moments] == [2 * 10 * 2 + 10 * 2 + 1.5 * 10 * each for each in (4, 2, 4, 2)]


def test_matrices_in_four_bits_take_a_quarter_and_no_zero_stage_cuts_them() -> None:
    part = PartConfig(num_actors=4, tensor=1, dtype="bfloat16", lora=LoraConfig(rank=8, quantization="nf4"))
    shape = PartShape(1 << 16, 1 << 16, 1 << 16, trained=0, quantized=1 << 15)
    # Four bits a value, 8 for each block of 64 values, 32 for 256 of these.
    weights = 2 * (1 << 15) + (1 << 14) + (1 << 9) + 4 * 2
    assert rank_bytes(part, spec(data=4), shape) == RankBytes(weights, 0, 0)
    assert by_zero_stage(part, spec(data=4), shape) == {0: weights, 1: None, 2: None, 3: None}


def test_every_stage_is_told_and_stage_1_of_slices_has_no_engine() -> None:
    part = PartConfig(num_actors=8, tensor=2, data=4, ulysses=1, ring=1, dtype="bfloat16", zero_stage=3)
    split = spec(data=4, tensor=2)
    assert by_zero_stage(part, split, PartShape(200, 100, 0)) == {0: 1800, 1: None, 2: 600, 3: 400}
    assert runtime_bytes(split) > runtime_bytes(spec())


def test_what_is_not_trained_keeps_its_weights_alone() -> None:
    part = PartConfig(num_actors=1, tensor=1, dtype="bfloat16")
    assert rank_bytes(part, spec(), PartShape(100, 100, 100, trained=10)) == RankBytes(200, 40, 120)
    frozen = replace(spec(), trains=False)
    assert rank_bytes(part, frozen, PartShape(100, 100, 100)) == RankBytes(200, 0, 0)
    assert by_zero_stage(part, frozen, PartShape(100, 100, 100)) == {0: 200, 1: None, 2: None, 3: None}


def test_a_float64_value_takes_eight_bytes_and_an_unknown_format_is_refused() -> None:
    part = PartConfig(num_actors=1, tensor=1, dtype="float64")
    assert rank_bytes(part, spec(), PartShape(10, 10, 10)) == RankBytes(80, 80, 160)
    with pytest.raises(ConfigError, match="dtype=int3"):
        rank_bytes(PartConfig(dtype="int3"), spec(), PartShape(10, 10, 10))


def test_states_of_other_optimizers() -> None:
    """Half of the parameters with one average of each instead of two."""
    part, shape = PartConfig(dtype="bfloat16", zero_engine="fsdp", tensor=1), PartShape(100, 100, 100, states=1.5)
    assert rank_bytes(part, spec(), shape) == RankBytes(200, 400, 1000)
    assert rank_bytes(replace(part, zero_stage=3), spec(data=4), shape) == RankBytes(0, 100, 250)
    assert by_zero_stage(part, spec(data=4), shape)[1] is None  # torch's engine alone holds them
    assert copied_bytes(part, spec(), shape) == 200 + 1000


def test_numbers_that_each_optimizer_keeps() -> None:
    matrix = HeldParameter(("a",), 100, 50, True, True, False, (10, 10), True)
    other = HeldParameter(("b",), 30, 30, False, True, False, (3, 10))
    frozen = HeldParameter(("c",), 20, 20, False, False, False, (2, 10), True)
    assert sum_shape([matrix, other, frozen], True) == PartShape(150, 100, 50, 80, small=100)
    experts = [replace(one, shared_out=True) for one in (matrix, frozen)]
    assert sum_shape(experts, True) == PartShape(120, 70, 20, 50, small=70, experts=70, trained_experts=50)
    assert sum_shape([matrix, other, frozen], True, "muon") == PartShape(
        150, 100, 50, 80, states=110 / 80, orthogonalizing=15_000.0, small=100
    )
    factors = PartShape(150, 100, 50, 80, states=0.0, factors=20 + 13, small=100)
    assert sum_shape([matrix, other, frozen], True, "adafactor") == factors
    large = HeldParameter(("d",), 10**5 + 1, 10**5 + 1, False, True, False, (10**5 + 1,))
    assert sum_shape([large], False).small == 0
    vector = HeldParameter(("d",), 8, 8, False, True, False, (8,))
    assert sum_shape([vector], False, "adafactor") == PartShape(8, 8, 8, states=1.0, small=8)
    cut = rank_bytes(PartConfig(zero_engine="fsdp", zero_stage=3), spec(data=4), factors)
    assert cut == RankBytes(20, 80, 80 + 33 * 4)  # 5 frozen weights; the factors are whole on every rank
    assert sum_shape([frozen], True, "muon") == PartShape(20, 20, 20, 0, small=20)


ONE = Degrees()
ALL_CHOICES = ("none", "light", "mlp", "linear", "all")
PATCHES, TARGETS = 32 * 32, 20


def measured(
    model: str, dtype: str, degrees: Degrees, choices: tuple[str, ...], steps: int = 1, **more: object
) -> Iterator[tuple[str, str, StageUsage]]:
    """(recompute, part, usage of the fullest rank) of steps of one sample with one picture. steps: see
    `with_most_replayed`."""
    case = replace(Case(degrees, degrees, 1, dtype, packing=True), **more)
    samples = [make_sample([(1, 32, 32)], 40, TARGETS, 0, IMAGE_TOKEN)]
    data = make_reader(model, case, [samples]).step(0)
    none = {"recompute": lambda stage: ("none",) * len(stage.layers)}
    with Running(model, case, Fault(EncoderEngine, TextEngine), measure=True, **none) as running:
        for choice in choices:
            for stage, group in running.groups.items():
                layers = len(running.graph.stage(stage).layers)
                group.execute_all_async("set_recompute", (choice,) * layers, returns=0)
            found = [running.step(data)[1] for _ in range(steps)]
            for part in found[0]:
                usages = [usage for reports in found if (usage := usage_of(reports[part])) is not None]
                if usages:
                    yield choice, part, with_most_replayed(usages)


def with_most_replayed(usages: list[StageUsage]) -> StageUsage:
    """Of some steps alike: of each layer's replays the one that added most. Gloo's thread lets go of what it gathered a
    moment after a collective's end, so that what a replay frees may have been there when it began."""
    first, added = usages[0], zip(*([layer.replay_bytes for layer in usage.layers] for usage in usages), strict=True)
    layers = (replace(layer, replay_bytes=max(of)) for layer, of in zip(first.layers, added, strict=True))
    return replace(first, layers=tuple(layers))


def traced(model: str, part: str, usage: StageUsage, dtype: str, tensor: int = 1, **more: object) -> StageUsage:
    """The same without a rank. 64 windows of 16 patches."""
    rows = TracedRows(usage.rows, PATCHES // 4, TARGETS, PATCHES, 64)
    return trace_part(model, load_family(model), part, rows, TraceSettings(dtype, tensor, usage.choices, **more))


def bytes_of(usage: StageUsage) -> tuple[object, ...]:
    layers = [(one.kind, one.choice, one.held_bytes, one.replay_bytes) for one in usage.layers]
    return usage.peak_bytes, usage.before_bytes, usage.after_bytes, usage.rows, layers


@pytest.mark.parametrize("dtype", [slow("float32"), "bfloat16"])
@pytest.mark.parametrize("model", ["made_model", "qwen3_vl_model"])
def test_every_byte_is_that_of_a_real_step(model: str, dtype: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(model)
    found = list(measured(path, dtype, ONE, ALL_CHOICES))
    assert len(found) == 2 * len(ALL_CHOICES)
    for choice, part, usage in found:
        own = traced(path, part, usage, dtype)
        if (model, dtype, part) == ("qwen3_vl_model", "bfloat16", "vision"):
            # Mean and deviation of torch's layer norm: two bytes each on a CPU, four on the meta device and on GPUs.
            extra = own.layers[-1].held_bytes + own.layers[-1].replay_bytes
            extra -= usage.layers[-1].held_bytes + usage.layers[-1].replay_bytes
            assert extra == 2 * 2 * 2 * PATCHES
            continue
        assert bytes_of(own) == bytes_of(usage), (choice, part)


def test_of_a_tensor_rank(made_model: str) -> None:
    for choice, part, usage in measured(made_model, "float32", Degrees(tensor=2), ("none", "mlp")):
        own = traced(made_model, part, usage, "float32", tensor=2)
        # A slice of the vocabulary keeps which tokens are its own, and their rows: a byte and eight a token.
        outside = 9 * usage.rows if part == "text" else 0
        own = replace(own, before_bytes=own.before_bytes + outside, peak_bytes=own.peak_bytes + outside)
        assert bytes_of(own) == bytes_of(usage), (choice, part)


@pytest.mark.parametrize("model", ["made_model", slow("qwen3_vl_model")])
@pytest.mark.slow
def test_of_a_tensor_rank_with_sharded_norms(model: str, request: pytest.FixtureRequest) -> None:
    """Each layer keeps less than without, and what is traced is what a rank keeps."""
    path, sharded = request.getfixturevalue(model), {"sharded_norms": True}
    for choice, part, usage in measured(path, "float32", Degrees(tensor=2), ("none", "light", "all"), 3, **sharded):
        own = traced(path, part, usage, "float32", tensor=2, sequence_sharded_norms=True)
        outside = 9 * usage.rows if part == "text" else 0
        own = replace(own, before_bytes=own.before_bytes + outside, peak_bytes=own.peak_bytes + outside)
        assert bytes_of(own) == bytes_of(usage), (choice, part)
        whole = traced(path, part, usage, "float32", tensor=2)
        assert own.peak_bytes < whole.peak_bytes and own.layers[0].held_bytes < whole.layers[0].held_bytes


@pytest.mark.parametrize("sharded", [False, slow(True)], ids=["whole norms", "sharded norms"])
@pytest.mark.slow
def test_of_a_tensor_rank_with_adapters(made_model: str, sharded: bool) -> None:
    """The embedding is frozen: it keeps nothing for backward."""
    own = {part: AdapterSettings(4, 4.0) for part in ("vision", "text")}
    lora, choices = tuple(own.items()), ("none", "all")
    for choice, part, usage in measured(
        made_model, "float32", Degrees(tensor=2), choices, 3, lora=lora, sharded_norms=sharded
    ):
        trains = rules_of(made_model, Case(ONE, ONE, 1, lora=lora)).trains
        more = {"adapters": own, "sequence_sharded_norms": sharded, "trains": trains}
        found = traced(made_model, part, usage, "float32", tensor=2, **more)
        assert bytes_of(found) == bytes_of(usage), (choice, part)


def test_a_slice_of_the_vocabulary_need_not_have_the_row_that_pads(tiny_assets: Path) -> None:
    model = str(tiny_assets / "model")
    family = load_family(model)
    settings = TraceSettings("float32", 2, ("none",) * len(family.decoder.layers.kinds))
    assert trace_part(model, family, "text", TracedRows(64, 16, 4), settings).peak_bytes > 0


def test_what_is_frozen_keeps_nothing(made_model: str) -> None:
    """The tower and its projector, and gradients that the decoder does not send back."""
    frozen = ("vision", "projector")
    decoder_only = {"trains": lambda name: "visual" not in name, "receives_gradients": False}
    found = list(measured(made_model, "float32", ONE, ("none",), frozen=frozen))
    assert [part for _, part, _ in found] == ["vision", "text"] and found[0][2].peak_bytes == 0
    for _, part, usage in found:
        assert bytes_of(traced(made_model, part, usage, "float32", **decoder_only)) == bytes_of(usage)


def test_other_rows_keep_other_bytes(made_model: str) -> None:
    """The negative control of those above."""
    ((_, part, usage), *_) = measured(made_model, "float32", ONE, ("none",))
    assert part == "vision"
    assert bytes_of(traced(made_model, part, replace(usage), "bfloat16")) != bytes_of(usage)
    rows = TracedRows(usage.rows, PATCHES // 4, TARGETS, PATCHES - 64, 15)
    settings = TraceSettings("float32", 1, usage.choices)
    assert trace_part(made_model, load_family(made_model), part, rows, settings).peak_bytes < usage.peak_bytes


def test_experts_that_multiply_in_groups_keep_what_shapes_say(tmp_path: Path) -> None:
    """However tokens are routed: each visits so many experts."""
    model = str(save_family("qwen3_vl_moe", tmp_path))
    family, sample = load_family(model), Maker(model).sample([3], 20, 0)
    case = Case(ONE, ONE, 1, "bfloat16", packing=True)
    data = make_reader(model, case, [[sample]]).step(0)
    features, targets = int((sample.mm_token_type_ids > 0).sum()), int((sample.labels[1:] != IGNORED).sum())
    with Running(model, case, Fault(EncoderEngine, TextEngine), measure=True) as running:
        layers = len(running.graph.stage("text").layers)
        for choice in ("none", "mlp", "all"):
            running.groups["text"].execute_all_async("set_recompute", (choice,) * layers, returns=0)
            usage = usage_of(running.step(data)[1]["text"])
            assert usage is not None
            rows, settings = TracedRows(usage.rows, features, targets), TraceSettings("bfloat16", 1, usage.choices)
            assert bytes_of(trace_part(model, family, "text", rows, settings)) == bytes_of(usage), choice


WHOLE = ["internvl", "gemma3", "qwen3_5", *map(slow, ("llava_siglip", "aya_vision", "glm4v"))]


@pytest.mark.parametrize("name", WHOLE)
def test_pictures_taken_whole_and_towers_that_count_patches(name: str, tmp_path: Path) -> None:
    """Without values a layer norm keeps four bytes a patch more, and a decoder has no blocks of pictures."""
    model = str(save_family(name, tmp_path))
    family, sample = load_family(model), Maker(model).sample([0, 0], 20, 0)
    case = Case(ONE, ONE, 1, "bfloat16", packing=True)
    data = make_reader(model, case, [[sample]]).step(0)
    features, targets = int((sample.mm_token_type_ids > 0).sum()), int((sample.labels[1:] != IGNORED).sum())
    patches = sum(map(len, sample.pixels))
    assert patches == features * family.tower.patches_of_token  # or a forecast has too few of them
    with Running(model, case, Fault(EncoderEngine, TextEngine), measure=True) as running:
        for choice in ("none", "all"):
            for stage, group in running.groups.items():
                layers = len(running.graph.stage(stage).layers)
                group.execute_all_async("set_recompute", (choice,) * layers, returns=0)
            for part, reports in running.step(data)[1].items():
                usage = usage_of(reports)
                assert usage is not None
                rows = TracedRows(usage.rows, features, targets, patches)
                found = trace_part(model, family, part, rows, TraceSettings("bfloat16", 1, usage.choices))
                assert found.peak_bytes == pytest.approx(usage.peak_bytes, rel=0.025), (part, choice)


# Parts whose code looks at values that a trace does not have, by the tiny models of all declared families.
UNTRACED = {
    ("gemma4", "text"), ("gemma4", "vision"), ("gemma4_moe", "text"), ("gemma4_moe", "vision"), ("ovis2", "text"),
    ("idefics3", "vision"), ("smolvlm", "vision"), ("ernie4_5_vl_moe", "vision"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_which_families_can_be_traced(name: str, tmp_path: Path) -> None:
    model = str(tmp_path)
    model_type, arguments = FAMILIES[name]
    CONFIG_MAPPING[model_type](**arguments).save_pretrained(model)
    family = load_family(model)
    for part in ("text", "vision"):
        own = family.parts[part]
        patches = 0 if part == "text" else 4 * max(family.tower.patches_of_picture, family.tower.merge_unit)
        rows = TracedRows(24, 8, 6, patches)
        settings = TraceSettings("bfloat16", 1, ("none",) * len(own.layers.kinds))
        if (name, part) in UNTRACED:
            with pytest.raises(ModelError, match=f"what the {part} part of .* its code asks for more than shapes"):
                trace_part(model, family, part, rows, settings)
        else:
            assert trace_part(model, family, part, rows, settings).peak_bytes > 0


def test_a_part_that_looks_at_values_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = str(save_llava_with_experts(tmp_path_factory.mktemp("experts")))
    settings = TraceSettings("float32", 1, ("none", "none"))
    with pytest.raises(ModelError, match="the text part of .* is not known before it runs"):
        trace_part(model, load_family(model), "text", TracedRows(64, 16), settings)


@pytest.mark.parametrize("part", ROWS)
def test_a_compiled_gate_saves_what_it_multiplies_alone(part: str, made_model: str) -> None:
    """Of each token: not what the activation gives."""
    family, rows, dtype = load_family(made_model), ROWS[part][0], "bfloat16"
    depth = len(family.parts[part].layers.kinds)
    tokens = rows.patches or rows.tokens
    plain, compiled = (
        sum(one.held_bytes for one in trace_part(made_model, family, part, rows, settings).layers)
        for kernels in ({}, {"gate": "compiled"})
        if (settings := TraceSettings(dtype, 1, ("none",) * depth, kernels=kernels))
    )
    config = json.loads((Path(made_model) / "config.json").read_text())[f"{part}_config"]
    width = config["intermediate_size"]
    assert plain - compiled == depth * tokens * width * 2


DROPPING = AdapterSettings(2, 4.0, dropout=0.1)


def twice(module: Any, states: torch.Tensor) -> torch.Tensor:
    """An MLP whose last matrix is given two rows a token."""
    inner = module.act_fn(module.gate_proj(states)) * module.up_proj(states)
    return module.down_proj(torch.stack([inner, inner]))[0]


@pytest.mark.parametrize(
    ("part", "kind", "rows", "tokens"), [("text", Qwen2MLP, 24, 12), ("vision", Qwen2_5_VLMLP, 96, 48)]
)
def test_rows_that_are_no_tokens_are_refused(
    part: str, kind: type, rows: int, tokens: int, made_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = load_family(made_model)
    check_draws(made_model, family, part, DROPPING)
    monkeypatch.setattr(kind, "forward", twice)
    wanted = (
        rf"^{part}\.lora\.dropout=0\.1 of .*\.down_proj: it is given {rows} rows where the part has {tokens} tokens"
    )
    with pytest.raises(ConfigError, match=wanted):
        check_draws(made_model, family, part, DROPPING)
    check_draws(made_model, family, part, AdapterSettings(2, 4.0))
    check_draws(made_model, family, part, AdapterSettings(2, 4.0, dropout=0.1, targets=("q_proj", "attn.proj")))
