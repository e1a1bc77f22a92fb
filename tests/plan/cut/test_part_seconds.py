"""Seconds of parts that a run measures, and the cuts of later runs by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dhp.core.reports import LayerUsage, StageReport, StageUsage
from dhp.plan.count.units import Unit
from dhp.plan.cut.part_seconds import FILE, STEPS, SecondsOfParts, as_measured
from dhp.plan.run_plan import RunPlan
from tests.plan.cut.test_chain import APART, CHAIN, cuts_of, plan_of

FEW = ("training.batch_size=4", "training.micro_batch_size=2")  # two micro-batches


def report(forward_s: float, backward_s: float, rank: int = 0) -> StageReport:
    usage = StageUsage(9, 1, 1, 4, 8, forward_s, backward_s, (LayerUsage("full", "all", 1, 1, 0.5),))
    return StageReport(rank, None, 1.0, {}, None, {}, usage, (), False)


def measure(plan: RunPlan, steps: int, tower_s: float = 8.0) -> None:
    seconds = SecondsOfParts(plan.config, plan.graph, plan.family, plan.config.memory.cache_dir)
    for step in range(steps):
        long = 100.0 if step == 0 else 1.0  # the first step, which does not count
        of_tower = [report(tower_s * long, 2 * tower_s)]
        reports = {
            stage.name: of_tower if stage.part == "vision" else [report(1.0, 2.0)] for stage in plan.graph.stages
        }
        seconds.learn(reports)


@pytest.fixture
def plan(four_layers_model: str, tmp_path: Path) -> RunPlan:
    return plan_of(four_layers_model, *APART, *FEW, f"memory.cache_dir={tmp_path}")


def units() -> tuple[Unit, ...]:
    return tuple(
        Unit(name, part, 1, forward_s, 2 * forward_s)
        for part, of_layers in (("vision", (1.0, 3.0)), ("text", (2.0, 2.0)))
        for name, forward_s in zip("ab", of_layers, strict=True)
    )


def test_units_take_the_seconds_of_their_parts(plan: RunPlan) -> None:
    """A stage of the tower took 8 s for two micro-batches, and there are two; of the decoder 1 s, and there are
    three."""
    measure(plan, STEPS + 1)
    found, note = as_measured(plan.config, plan.family, units())
    assert note == ", by seconds measured before"
    assert [unit.forward_s for unit in found] == pytest.approx([2.0, 6.0, 0.75, 0.75])
    assert [unit.backward_s for unit in found] == pytest.approx([4.0, 12.0, 1.5, 1.5])


def test_what_a_plan_lets_layers_recompute_is_no_part_of_their_backward(four_layers_model: str, tmp_path: Path) -> None:
    """Half a second in each of the decoder's three stages."""
    automatic = ("text.recompute=auto", "memory.budget_gib=1", f"memory.cache_dir={tmp_path}")
    plan = plan_of(four_layers_model, *APART, *FEW, *automatic)
    measure(plan, STEPS + 1)
    found, _ = as_measured(plan.config, plan.family, units())
    assert [unit.forward_s for unit in found] == pytest.approx([2.0, 6.0, 0.75, 0.75])
    assert [unit.backward_s for unit in found] == pytest.approx([4.0, 12.0, 1.125, 1.125])


def test_too_few_steps_are_not_kept(plan: RunPlan, tmp_path: Path) -> None:
    measure(plan, STEPS)
    assert not (tmp_path / FILE).exists()
    assert as_measured(plan.config, plan.family, units()) == (units(), "")


def test_other_shapes_and_broken_files_are_not_read(plan: RunPlan, tmp_path: Path) -> None:
    measure(plan, STEPS + 1)
    other = replace(plan.config, training=replace(plan.config.training, micro_batch_size=1))
    assert as_measured(other, plan.family, units()) == (units(), "")
    sharded = replace(plan.config, text=replace(plan.config.text, sequence_sharded_norms=True))
    assert as_measured(sharded, plan.family, units()) == (units(), "")
    alone = replace(plan.config, memory=replace(plan.config.memory, cache_dir=None))
    assert as_measured(alone, plan.family, units()) == (units(), "")
    (tmp_path / FILE).write_text("[]")
    assert as_measured(plan.config, plan.family, units()) == (units(), "")


def test_a_slower_tower_gets_fewer_layers_beside_the_decoder(four_layers_model: str, tmp_path: Path) -> None:
    """Three devices: of a tower that takes nearly all of the time, each holds what it can."""
    asked = (*CHAIN, *FEW, "text.num_actors=2", f"memory.cache_dir={tmp_path}")
    found = {}
    for tower_s in (0.01, 100.0):
        measure(plan_of(four_layers_model, *asked), STEPS + 1, tower_s)
        cuts = cuts_of(four_layers_model, *asked)
        assert cuts["text"].why.endswith("measured before")
        found[tower_s] = cuts["vision"].cuts[0]
    assert found[0.01] == 3 and found[100.0] == 2
