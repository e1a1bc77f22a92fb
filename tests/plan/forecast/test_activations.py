"""Activations before anything runs: stages' from whole parts', against what ranks of a pipeline count."""

from __future__ import annotations

import pytest

from dhp.config.training import TrainingConfig
from dhp.core.axes import Degrees
from dhp.core.errors import ModelError
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.text_engine import TextEngine
from dhp.models.registry import load_family
from dhp.plan.count.counted_model import Counted, Cut
from dhp.plan.count.row_bytes import TracedRows
from dhp.plan.recompute.profile import usage_of
from dhp.plan.run_plan import plan_run
from dhp.plan.search.verdict import expect
from dhp.plan.trainable import training_rules
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
    rules = training_rules(TrainingConfig(), family)
    kept = Counted(family, four_layers_model, rules, {}, "sft").keeps("text", Cut("float32"))
    costs = [kept.costs(rows, stage.layers) for stage in stages]
    for stage, own in zip(stages, costs, strict=True):
        held = [own.layer(at, choice).held_bytes for at in range(2)]
        assert held == pytest.approx([one.held_bytes for one in usages[stage.name].layers])
    # Numbers travel as one: tokens, three positions and kinds of each, places of targets, their tokens, of features.
    numbers = 8 * (5 * rows.tokens + 2 * TARGETS + FEATURES)
    first, last = costs
    assert first.before_bytes - usages["text.0"].before_bytes == 8 * 2 * TARGETS
    assert usages["text.1"].after_bytes - last.after_bytes == numbers
    assert (first.after_bytes, last.before_bytes) == (0, 0)


def test_a_stage_holds_as_many_micro_batches_as_its_schedule_has(four_layers_model: str) -> None:
    """1F1B over two stages: the first holds two, the second one; the tower three."""
    cut = ("cluster.device=cpu", "cluster.collocate=false", "text.cuts=[2]")
    found = expect(plan_run(config_of(four_layers_model, *PIPELINE, *cut), four_layers_model)).forecast
    assert found is not None
    assert {name: own.holds for name, own in found.memory.items()} == {"vision": 3, "text.0": 2, "text.1": 1}
    for own in found.memory.values():
        assert own.activations == pytest.approx((own.holds - 1) * own.held_bytes + own.held_bytes, rel=0.5)


def test_recompute_keeps_less_and_what_is_frozen_nothing(four_layers_model: str) -> None:
    base = (*PIPELINE, "text.cuts=[2]", "training.frozen=[vision,projector]", "vision.zero_stage=0")
    none, full = (
        expect(plan_run(config_of(four_layers_model, *base, f"text.recompute={choice}"))).forecast
        for choice in ("none", "full")
    )
    assert none is not None and full is not None
    assert full.memory["text.0"].activations < 0.5 * none.memory["text.0"].activations
    assert none.memory["vision"].activations == 0


def test_what_cannot_be_traced_is_said(four_layers_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object, **more: object) -> None:
        raise ModelError("the text part of this model cannot be traced")

    monkeypatch.setattr("dhp.plan.count.counted_model.trace_layers", refused)
    config = config_of(four_layers_model, *PIPELINE, "data.cache_dir=null")
    found = expect(plan_run(config))
    assert found.forecast is None and "the text part of this model cannot be traced" in found.why
