"""Bytes by numbers of rows, from a few traces, are those of a trace of the same rows, to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from dhp.core.reports import RecomputePolicies, StageUsage
from dhp.models.family import Family
from dhp.models.registry import load_family
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
from dhp.plan.count.traced import TraceSettings, trace_moments
from tests.helpers.rows import slow_but

TEXT = (TracedRows(256, 64, 32), TracedRows(777, 192, 301))
TOWER = (TracedRows(0, patches=1024, windows=64), TracedRows(0, patches=64 * 48, windows=64))
DEEP = 20  # layers
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


@pytest.mark.parametrize(("model", "dtype", "tensor", "part"), slow_but(TRACED, QUICK[0]))
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
