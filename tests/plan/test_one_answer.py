"""One question has one answer: all who ask what a run takes read the same numbers."""

from dataclasses import asdict
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.core.reports import DeviceInfo
from dhp.core.text import binary_size
from dhp.data.sample.sample import LENGTH_COLUMNS
from dhp.plan.batches import assumed_rows
from dhp.plan.count.samples import assumed_samples
from dhp.plan.cut.partition import PartUnits
from dhp.plan.forecast.forecast import Forecast
from dhp.plan.run_plan import Question, RunPlan, plan_run
from dhp.plan.search.free_keys import FixedKeys, searched_keys
from dhp.plan.search.layout_search import search
from dhp.plan.search.space import make_space, read_subject
from dhp.plan.search.verdict import expect
from dhp.report.tables import figures
from dhp.trainer.dry_run import dry_run
from dhp.trainer.ready import costs_ahead, expected, look_ahead

PIPELINE = ("text.parallelism=pipeline", "text.num_actors=2", "training.schedule=1f1b")
RUNS = {
    "shared devices": (),
    "tensor beside ulysses": ("text=tensor", "text.num_actors=2", "vision.num_actors=2"),
    "fsdp in bfloat16": ("text.num_actors=2", "vision.num_actors=2", "text.zero_stage=3", "text.dtype=bfloat16"),
    "a pipeline": PIPELINE,
    "recompute=auto in a pipeline": (*PIPELINE, "text.recompute=auto", "memory.budget_gib=0.001"),
}
H100 = DeviceInfo("cuda", "NVIDIA H100 80GB HBM3", "", "float32", memory_bytes=80 << 30)


@cache
def plan_of(model: str, run: str) -> RunPlan:
    names = [f"{part}.model_name={model}" for part in ("vision", "text")]
    return plan_run(resolve(compose_config("tiny", overrides=[*names, "cluster.device=cuda", *RUNS[run]])))


@pytest.fixture(params=RUNS)
def plan(request: pytest.FixtureRequest, made_model: str) -> RunPlan:
    return plan_of(made_model, request.param)


def asked(plan: RunPlan) -> tuple[Question, Forecast]:
    """The question of a dry run, and its answer."""
    made = expect(plan)
    assert made.question is not None and made.forecast is not None, made.why
    return made.question, made.forecast


def test_a_dry_run_prints_it(plan: RunPlan) -> None:
    _, found = asked(plan)
    printed = dry_run(plan.config)
    assert f"{found.step_s:.3g} s a step" in printed
    assert f"{binary_size(found.peak.total)} on the fullest device" in printed
    assert f"bubble {found.timeline.bubble:.0%}" in printed or found.timeline.bubble < 0.01


def test_a_search_that_may_change_nothing_finds_it(plan: RunPlan) -> None:
    question, found = asked(plan)
    subject = read_subject(plan.config, lambda _: None)
    samples = assumed_samples(plan.config, plan.family)
    held = FixedKeys(tuple(searched_keys(plan.config)))
    (only,) = search(make_space(subject, held, question.machine, samples, lambda _: None)).candidates
    assert (only.found.step_s, only.found.peak.total) == (found.step_s, found.peak.total)
    assert only.found.recompute == found.recompute


def test_cuts_weigh_the_same_seconds(plan: RunPlan) -> None:
    question, found = asked(plan)
    units = PartUnits(plan.config, plan.counted)
    for stage in plan.graph.stages:
        of_part = units.of(stage.part)
        first, last = stage.layers[0] == 0, stage.layers[-1] == len(of_part) - 3
        own = [of_part[at + 1] for at in stage.layers] + first * [of_part[0]] + last * [of_part[-1]]
        forward_s = sum(unit.forward_s for unit in own)
        assert forward_s == pytest.approx(sum(found.stages[stage.name].forward_s), rel=1e-12)
        if set(found.recompute[stage.name]) == {"none"}:
            backward_s = sum(unit.backward_s for unit in own)
            assert backward_s == pytest.approx(sum(found.stages[stage.name].backward_s), rel=1e-12)


def lengths(plan: RunPlan) -> np.ndarray:
    """Of samples like the assumed ones."""
    rows, unit = assumed_rows(plan.config), plan.family.tower.merge_unit
    columns = np.zeros(plan.config.training.batch_size, LENGTH_COLUMNS)
    columns["text"], columns["vision"], columns["patches"] = rows.tokens, rows.pictures, rows.pictures * unit
    columns["squares"], columns["pictures"], columns["targets"] = (rows.pictures * unit) ** 2, 1, rows.targets
    columns["pairs"] = rows.tokens**2
    return columns


def test_a_run_says_it_in_its_first_lines_and_its_report(plan: RunPlan) -> None:
    question, found = asked(plan)
    count = plan.graph.device_count()
    data = SimpleNamespace(ask=lambda *_, **__: lengths(plan))
    session = SimpleNamespace(plan=plan, config=plan.config, data=data, node_devices=count, threads=1)
    devices = [DeviceInfo(**{**asdict(H100), "device_id": f"GPU {at}"}) for at in range(count)]
    ahead = look_ahead(session, devices)
    beside, (line,) = expected(ahead)
    assert beside.planned.step_s == pytest.approx(found.step_s, rel=1e-12)
    assert beside.planned.memory_bytes == {name: one.peak.total for name, one in found.memory.items()}
    assert f"planned {found.step_s:.3g} s a step" in line
    summary, steps = {"planned": asdict(beside.planned)}, [SimpleNamespace(step=1, loss=1.0, graphs=None)]
    record = SimpleNamespace(steps=steps, evaluations=[], status="finished", summary=summary)
    shown = figures(record, SimpleNamespace(step_s=np.array([2 * found.step_s])))
    assert shown["planned step"] == f"{found.step_s:.3g} s (took 2.00 times as long)"


def test_what_layers_keep_is_what_recompute_auto_weighs(plan: RunPlan) -> None:
    question, found = asked(plan)
    costs = costs_ahead(SimpleNamespace(question=question))
    assert costs is not None
    for name, known in costs.items():
        choices, memory = found.recompute[name], found.memory[name]
        most = (memory.holds - 1) * known.held_bytes(choices) + known.peak_bytes(choices)
        assert most == pytest.approx(memory.activations)
