"""A run's step and memory before it starts, on devices whose rates are round numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dhp.core.errors import ConfigError
from dhp.models.shape import hidden_matrices
from dhp.plan.bench.machine import Machine
from dhp.plan.count.counted_model import Counted, Cut
from dhp.plan.count.loads import RunLoads, even_loads, text_rows
from dhp.plan.forecast.forecast import Forecast, forecast
from dhp.plan.run_plan import Question, RunPlan, plan_run
from tests.plan.cut.test_partition import FROZEN_TOWER, PIPELINE, config_of
from tests.plan.made import RATES, machine

ONE = ("vision.num_actors=1", "vision.ulysses=1", "vision.zero_stage=0", "text.num_actors=1", "text.tensor=1")


def loads_for(plan: RunPlan, tokens: int = 256, picture: int = 64, targets: int = 32) -> RunLoads:
    config = plan.config
    return even_loads(config.training.micro_batch_size, tokens, picture, targets, config.text.data, 4)


def ask(plan: RunPlan, made: Machine | None = None, **lengths: int) -> Forecast:
    return forecast(Question(plan, made or machine(), loads_for(plan, **lengths)))


def test_a_step_takes_its_operations_by_the_rate(made_model: str) -> None:
    plan = plan_run(config_of(made_model, *ONE))
    found = ask(plan)
    kinds, text, tower = found.kinds(), plan.family.decoder.work, plan.family.tower.work
    samples = plan.config.training.micro_batch_size * found.micro_batches
    pictures = 4 * tower.patch * 256 + 6 * tower.token * 256 + 6 * tower.embedding * 64  # pixels have no gradient
    decoder = 6 * (text.token * 256 + text.target * 32)
    assert kinds["products"] * 1e12 == pytest.approx(samples * (pictures + decoder))
    assert found.step_s == pytest.approx(sum(kinds.values())) and kinds["bubble"] == pytest.approx(0, abs=1e-12)
    twice = ask(plan, machine(replace(RATES, products=5e11, attention=5e11)))
    assert twice.step_s == pytest.approx(2 * found.step_s)


def test_an_update_by_muon_takes_its_products(made_model: str) -> None:
    """Five times three products of every hidden matrix; cut over replicas' shards, each rank its share of them."""
    muon = ("training.optimizer=muon", "text.zero_engine=fsdp", "vision.zero_engine=fsdp")
    plan = plan_run(config_of(made_model, *ONE, *muon))
    shapes = {one.name: one.shape for one in plan.counted.parameters}
    matrices = (sorted(shapes[name]) for name in hidden_matrices(shapes, plan.family))
    operations = sum(5 * (4 * m * m * n + 2 * m**3) for m, n in matrices)
    whole = ask(plan).kinds()["update"]
    assert whole * 1e12 == pytest.approx(operations)
    assert ask(plan_run(config_of(made_model, *ONE))).kinds()["update"] == 0
    cut = ("text.num_actors=2", "text.tensor=1", "text.data=2", "text.zero_stage=3")
    cut += ("vision.num_actors=2", "vision.ulysses=2", "vision.zero_stage=2")
    assert ask(plan_run(config_of(made_model, *muon, *cut))).kinds()["update"] == pytest.approx(whole / 2)


def test_seconds_that_a_driver_takes_come_on_top(made_model: str) -> None:
    plan = plan_run(config_of(made_model, *ONE))
    found = ask(plan, machine(action_s=0.5, step_s=3.0))
    assert found.fixed_s == 3.0 + 0.5 * 4 * found.micro_batches  # forward and backward of both parts
    assert found.step_s == pytest.approx(ask(plan).step_s + found.fixed_s)


def test_recomputing_takes_the_share_that_runs_again(made_model: str) -> None:
    plan, again = (plan_run(config_of(made_model, *ONE, f"text.recompute={kind}")) for kind in ("none", "all"))
    plain, recomputed = ask(plan), ask(again)
    layers = len(plan.family.decoder.layers.kinds)
    stage, other = plain.stages["text"], recomputed.stages["text"]
    assert other.forward_s == stage.forward_s
    assert other.backward_s[0] - stage.backward_s[0] == pytest.approx(other.kinds["recompute"])
    assert 0 < other.kinds["recompute"] < stage.forward_s[0]  # all layers, not the head
    assert recomputed.recompute["text"] == ("all",) * layers


def test_a_frozen_tower_goes_forward_alone(made_model: str) -> None:
    found = ask(plan_run(config_of(made_model, *ONE, *FROZEN_TOWER)))
    assert found.stages["vision"].backward_s == (0.0,) and found.stages["vision"].once_s == 0.0
    assert found.memory["vision"].held_bytes == 0


def test_what_never_is_together_is_not_added(made_model: str) -> None:
    plan = plan_run(config_of(made_model, *ONE))
    memory = ask(plan).memory["text"]
    by_name = {one.name: one for one in memory.others}
    assert set(by_name) == {"forward", "loss", "update", "backward"}
    assert "activations" not in by_name["update"].taken and "loss" not in by_name["backward"].taken
    assert memory.peak.total == max(one.total for one in memory.others)
    kinds = {kind for one in memory.others for kind in one.taken}
    together = {kind: max(one.taken.get(kind, 0.0) for one in memory.others) for kind in kinds}
    assert memory.peak.total < sum(together.values())


def test_stages_hold_as_many_micro_batches_as_the_schedule_has(four_layers_model: str) -> None:
    plan = plan_run(config_of(four_layers_model, *PIPELINE, "text.cuts=[2]"))
    found = ask(plan)
    assert (found.memory["text.0"].holds, found.memory["text.1"].holds) == (2, 1)
    own, held = found.memory["text.0"], found.memory["text.0"].held_bytes
    most = max(one.taken.get("activations", 0.0) for one in own.others)
    assert 2 * held <= most < 2.5 * held
    assert found.timeline.bubble > 0


def test_a_budget_is_filled_with_what_saves_most(four_layers_model: str) -> None:
    choose = ("text.recompute=auto", "vision.recompute=none", "cluster.device=cpu")
    least = ask(plan_run(config_of(four_layers_model, *ONE, "text.recompute=all", "vision.recompute=none")))
    most = ask(plan_run(config_of(four_layers_model, *ONE, "text.recompute=none", "vision.recompute=none")))
    held = [one.memory["text"].held_bytes for one in (least, most)]
    between = held[0] + 0.9 * (held[1] - held[0])
    budget = (between + most.memory["vision"].held_bytes) / 2**30
    plan = plan_run(config_of(four_layers_model, *ONE, *choose, f"memory.budget_gib={budget}"))
    found = ask(plan)
    assert least.memory["text"].held_bytes < found.memory["text"].held_bytes <= between
    assert most.step_s < found.step_s < least.step_s


def test_counts_are_kept_on_disk_and_equal(made_model: str, tmp_path: Path) -> None:
    plan = plan_run(config_of(made_model))
    own = (plan.family, plan.source, plan.rules, plan.adapters, "sft")
    first, cut = Counted(*own, tmp_path), Cut("bfloat16", 2)
    made = first.keeps("text", cut), first.held("text", cut), first.sizes, first.parameters
    assert list((tmp_path / "shapes").iterdir())
    again = Counted(*own, tmp_path)
    again._trace = None  # type: ignore[assignment, method-assign]  # nothing is traced a second time
    assert (again.keeps("text", cut), again.held("text", cut), again.sizes, again.parameters) == made
    rows = text_rows(loads_for(plan).worst, plan.graph.of_part("text")[0].degrees)
    layers = range(len(plan.family.decoder.layers.kinds))
    for choice in ("none", "all"):
        total = made[0].held_by(layers, choice).of(rows)
        assert total == pytest.approx(made[0].costs(rows, layers).held_bytes((choice,) * len(layers)))


def test_tower_operations_are_linear_in_the_load(made_model: str) -> None:
    from dhp.plan.count.unit_operations import TowerLoad, tower_operations

    plan = plan_run(config_of(made_model))
    counted, load = plan.counted, TowerLoad(512, 32768, 131072, 128, 2)
    exact = tower_operations(plan.family, counted.pieces, load)
    for found, own in zip(counted.tower_operations(load), exact, strict=True):
        assert found == pytest.approx(own)


def test_a_format_without_rates_is_refused(made_model: str) -> None:
    plan = plan_run(config_of(made_model, *ONE, "text.dtype=float64"))
    with pytest.raises(ConfigError, match="device=made has no rates in float64: known are float32"):
        ask(plan)
