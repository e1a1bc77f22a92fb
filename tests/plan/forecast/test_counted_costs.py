"""Costs by kind of layer, before a step: their sums are those of the same layers one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from dhp.config.command_line import compose_config
from dhp.config.parts import parts
from dhp.config.resolve import resolve
from dhp.core.reports import LayerUsage, StageUsage
from dhp.plan.bench.machine import assumed_cpu
from dhp.plan.count.counted_model import Cut
from dhp.plan.count.row_bytes import CHOICES, NONE
from dhp.plan.count.samples import EqualSamples, Samples
from dhp.plan.forecast.stage_bytes import counted_costs, rows_of_stage
from dhp.plan.recompute.profile import Profile
from dhp.plan.run_plan import Question, plan_run
from tests.helpers.rows import slow


def question_of(model: str, *overrides: str) -> Question:
    names = [f"{part}.model_name={model}" for part in ("vision", "text")]
    plan = plan_run(resolve(compose_config("tiny", overrides=[*names, *overrides])))
    loads = Samples(plan.family, None, EqualSamples(300, 64, 40)).loads(plan.config)
    return Question(plan, assumed_cpu(2, {"float32"}, float("inf")), loads)


@pytest.mark.parametrize("layout", [(), ("text.parallelism=pipeline",)], ids=["tensor", "pipeline"])
@pytest.mark.parametrize("model", ["made_model", slow("qwen3_vl_model")])
def test_kinds_of_layers_sum_to_layers(model: str, layout: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    asked = question_of(request.getfixturevalue(model), *layout)
    found = counted_costs(asked)
    assert set(found) == {stage.name for stage in asked.plan.graph.stages}
    for stage in asked.plan.graph.stages:
        own, count = found[stage.name], len(stage.layers)
        one_by_one = asked.counted.keeps(stage.part, Cut.of(parts(asked.plan.config)[stage.part])).costs(
            rows_of_stage(asked, stage), stage.layers
        )
        assert len(own.kinds) == count and own.rows == max(rows_of_stage(asked, stage).patches, one_by_one.rows)
        for first, rest in product(CHOICES, CHOICES):
            choices = (first, *[rest] * (count - 1))
            assert np.isclose(own.held_bytes(choices), one_by_one.held_bytes(choices), rtol=1e-12)
        for kind, of_kind in own.layers.items():
            seconds = [of_kind[choice].replay_s for choice in CHOICES]
            assert seconds[0] == 0 and seconds == sorted(seconds) and seconds[-1] > 0, kind
            assert of_kind[NONE].held_bytes > of_kind["all"].held_bytes >= 0


@pytest.mark.parametrize(
    "frozen", [(), ("training.frozen=[vision,projector]", "text.lora.rank=4")], ids=["all", "lora"]
)
@pytest.mark.parametrize("model", ["made_model", slow("qwen3_vl_model")])
def test_a_profile_of_them_takes_what_ranks_report(
    model: str, frozen: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    """Kinds are those of the family, though traces have more: layers that get features, and a first one."""
    asked = question_of(request.getfixturevalue(model), *frozen)
    for name, known in counted_costs(asked).items():
        stage = asked.plan.graph.stage(name)
        kinds = [asked.plan.family.parts[stage.part].layers.kinds[at] for at in stage.layers]
        assert list(known.kinds) == kinds and set(known.layers) == set(kinds)
        profile = Profile(known, counted=True)
        took = tuple(LayerUsage(kind, "light", 10, 5, 1.0) for kind in kinds)
        profile.add(StageUsage(100, 0, 0, known.rows, known.rows, 1.0, 1.0, took), timed=True)
        found = profile.costs()
        assert found is not None and set(found.layers) == set(kinds)
        for kind in set(kinds):
            assert found.layer(kinds.index(kind), "light").replay_s == known.layers[kind]["light"].replay_s
