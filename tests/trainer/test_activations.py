"""Activations before anything runs: stages' from whole parts', against what ranks of a pipeline count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dhp.core.axes import Degrees
from dhp.core.reports import LayerUsage, StageUsage
from dhp.engine.encoder import EncoderEngine
from dhp.engine.text import TextEngine
from dhp.models.registry import load_family
from dhp.plan.count.traced import TracedRows, TraceSettings, trace_part
from dhp.plan.recompute.run_shape import usage_of
from dhp.plan.run_plan import plan_run
from dhp.trainer.activations import expected_activations, shared_bytes, stage_costs
from tests.helpers.layouts import Case, Fault, Running, make_reader
from tests.helpers.tiny import IMAGE_TOKEN, make_sample
from tests.plan.cut.test_partition import PIPELINE, config_of

ONE, TARGETS, FEATURES = Degrees(), 20, 256


@pytest.mark.parametrize("choice", ["none", "light", "all"])
def test_stages_keep_what_ranks_of_a_pipeline_count(four_layers_model: str, choice: str) -> None:
    case = Case(ONE, ONE, 1, "float32", packing=True, schedule="1f1b", stages=2)
    data = make_reader(four_layers_model, case, [[make_sample([(1, 32, 32)], 40, TARGETS, 0, IMAGE_TOKEN)]]).step(0)
    chosen = {"recompute": lambda stage: (choice,) * len(stage.layers)}
    with Running(four_layers_model, case, Fault(EncoderEngine, TextEngine), measure=True, **chosen) as running:
        reports = running.step(data)[1]
        stages = running.graph.of_part("text")
    family, usages = load_family(four_layers_model), {stage.name: usage_of(reports[stage.name]) for stage in stages}
    rows = TracedRows(usages["text.0"].rows, FEATURES, TARGETS)
    whole = trace_part(four_layers_model, family, "text", rows, TraceSettings("float32", 1, (choice,) * 4))
    for stage in stages:
        usage, own = usages[stage.name], stage_costs(stage, whole)
        assert [own.layer(at, choice).held_bytes for at in range(2)] == [one.held_bytes for one in usage.layers]
    # Numbers travel as one: tokens, three positions and kinds of each, places of targets, their tokens, of features.
    numbers = 8 * (5 * rows.tokens + 2 * TARGETS + FEATURES)
    first, last = (stage_costs(stage, whole) for stage in stages)
    assert first.before_bytes - usages["text.0"].before_bytes == 8 * 2 * TARGETS
    assert usages["text.1"].after_bytes - last.after_bytes == numbers
    assert (first.after_bytes, last.before_bytes) == (0, 0)


def usage(*held: int) -> StageUsage:
    layers = tuple(LayerUsage("full", "none", one, 5, 0.0) for one in held)
    return StageUsage(100, 7, 9, 4, 4, 0.0, 0.0, layers)


def test_what_layers_share_is_kept_once_a_stage() -> None:
    assert shared_bytes(usage(30, 20, 20)) == 10 and shared_bytes(usage(20, 30)) == 0 and shared_bytes(usage(20)) == 0


def test_a_stage_holds_as_many_micro_batches_as_its_schedule_has(four_layers_model: str) -> None:
    """1F1B over two stages: the first holds two, the second one; the tower three."""
    config = config_of(four_layers_model, *PIPELINE, "cluster.device=cpu", "cluster.collocate=false", "text.cuts=[2]")
    found = expected_activations(plan_run(config, four_layers_model))
    held = {stage: costs.held_bytes(found.plan[stage]) for stage, costs in found.costs.items()}
    peaks = {stage: costs.peak_bytes(found.plan[stage]) for stage, costs in found.costs.items()}
    assert list(held) == ["vision", "text.0", "text.1"] and not found.unknown
    for stage, count in {"vision": 3, "text.0": 2, "text.1": 1}.items():
        assert found.stage_bytes(stage) == (count - 1) * held[stage] + peaks[stage]
    both = found.device_bytes(frozenset({"text.0", "text.1"}))
    assert both == found.stage_bytes("text.0") + found.stage_bytes("text.1")


def test_recompute_keeps_less_and_what_is_frozen_nothing(four_layers_model: str) -> None:
    base = (*PIPELINE, "text.cuts=[2]", "training.frozen=[vision,projector]", "vision.zero_stage=0")
    none, full = (
        expected_activations(plan_run(config_of(four_layers_model, *base, f"text.recompute={choice}")))
        for choice in ("none", "full")
    )
    assert list(none.costs) == ["text.0", "text.1"]
    assert full.stage_bytes("text.0") < 0.5 * none.stage_bytes("text.0")
    assert none.device_bytes(frozenset({"vision"})) == 0


def test_what_cannot_be_traced_is_said(four_layers_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dhp.plan.count import traces

    right = traces.traced_rows
    wrong = lambda config, family, name: replace(right(config, family, name), tokens=-1)
    monkeypatch.setattr(traces, "traced_rows", wrong)
    found = expected_activations(plan_run(config_of(four_layers_model, *PIPELINE)))
    assert list(found.costs) == ["vision"]
    assert len(found.unknown) == 1 and "the text part of" in found.unknown[0]
