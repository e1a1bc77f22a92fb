"""A forecast's seconds, bytes and moments of a step."""

from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path

import numpy as np
import pytest

from dhp.config.command_line import compose_config
from dhp.config.devices import find_link
from dhp.config.parts import parts
from dhp.config.resolve import resolve
from dhp.config.schema import PartConfig
from dhp.config.steps import micro_batches, vision_batch
from dhp.config.training import TrainingConfig
from dhp.core.axes import Degrees
from dhp.core.errors import ConfigError, ModelError
from dhp.core.graph import Node, StageSpec
from dhp.core.reports import LayerUsage, StageUsage
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.text_engine import TextEngine
from dhp.models.registry import load_family
from dhp.models.shape import PartShape, hidden_matrices
from dhp.plan.bench.machine import HANDOVER as BY_HOST
from dhp.plan.bench.machine import Machine, assumed_cpu
from dhp.plan.count.costs import LayerCost, StageCosts
from dhp.plan.count.counted_model import Counted, Cut
from dhp.plan.count.loads import RunLoads, even_loads, text_rows
from dhp.plan.count.rates import Channel
from dhp.plan.count.row_bytes import CHOICES, NONE, InsideBytes, StageInsides, TracedRows
from dhp.plan.count.samples import EqualSamples, Samples, assumed_samples
from dhp.plan.count.state_bytes import BUCKET_ELEMENTS, Units, gathered_moments
from dhp.plan.count.unit_work import hidden_width
from dhp.plan.forecast.forecast import Forecast, forecast, play_step
from dhp.plan.forecast.moments import BACKWARD, FORWARD, LOSS, Passing, counted_costs, rows_of_stage, stage_memory
from dhp.plan.recompute.profile import Profile, usage_of
from dhp.plan.run_plan import Question, RunPlan, plan_run
from dhp.plan.search.verdict import expect
from dhp.plan.trainable import training_rules
from dhp.step.schedule import Backward, Forward
from dhp.step.timed import Timeline
from dhp.trainer.dry_run import bubble_lines, timeline_lines
from tests.helpers.layouts import Case, Fault, Running, make_reader
from tests.helpers.rows import slow
from tests.helpers.tiny import IMAGE_TOKEN, make_sample
from tests.plan.cut.test_partition import FROZEN_TOWER, PIPELINE, config_of
from tests.plan.made import RATES, machine

ONE = ("vision.num_actors=1", "vision.ulysses=1", "vision.zero_stage=0", "text.num_actors=1", "text.tensor=1")


def loads_for(plan: RunPlan, tokens: int = 256, picture: int = 64, targets: int = 32) -> RunLoads:
    config = plan.config
    step = micro_batches(config), vision_batch(config)
    return even_loads(config.training.micro_batch_size, tokens, picture, targets, config.text.data, 4, *step)


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


def test_a_pass_of_the_tower_holds_all_of_its_micro_batches_and_takes_fewer_calls(made_model: str) -> None:
    rows = (*ONE, "training.batch_size=8", "training.micro_batch_size=2", "vision.recompute=none")
    made = machine(action_s=0.5, step_s=3.0)
    each, whole = (
        ask(plan_run(config_of(made_model, *rows, f"training.vision_batch={batch}")), made) for batch in (1, "null")
    )
    assert whole.memory["vision"].held_bytes == pytest.approx(4 * each.memory["vision"].held_bytes)
    assert whole.memory["text"].held_bytes == each.memory["text"].held_bytes
    assert (each.fixed_s, whole.fixed_s) == (3.0 + 0.5 * 2 * (4 + 4), 3.0 + 0.5 * 2 * (4 + 1))
    assert whole.kinds()["products"] == pytest.approx(each.kinds()["products"])
    assert (each.passes, whole.passes) == ({"vision": 4, "text": 4}, {"vision": 1, "text": 4})
    assert whole.busy_s["vision"] == pytest.approx(each.busy_s["vision"])


def test_gradients_of_a_pass_go_by_way_of_the_host_between_gpus(made_model: str) -> None:
    """As the run's transport does then; with one pass a micro-batch, and without gradients, by the link."""
    link, rows = Channel(1e15), ("training.batch_size=8", "training.micro_batch_size=2")
    host, gpus = find_link(BY_HOST).bytes_s, machine(handover=link, contexts=True)

    def rate(made: Machine, batch: int, *more: str) -> float:
        plan = plan_run(config_of(made_model, *APART, *rows, f"training.vision_batch={batch}", *more))
        return made.channel(plan.graph.gradients_merge).bytes_s

    assert rate(gpus, 2) == host < link.bytes_s
    assert rate(gpus, 1) == rate(gpus, 2, *FROZEN_TOWER) == link.bytes_s
    assert rate(replace(gpus, count=1), 2) == rate(replace(gpus, contexts=False), 2) == link.bytes_s


def test_gradients_of_a_pass_wait_with_the_decoder_where_nothing_is_copied(made_model: str) -> None:
    """Of a pass over four micro-batches those of three, each for 64 tokens of a picture a sample."""
    rows = (*ONE, "training.batch_size=8", "training.micro_batch_size=2")
    mapped, copied = (machine(handover=Channel(rate), contexts=True) for rate in (inf, 1e9))

    def handed(made: Machine, batch: str, *more: str) -> float:
        found = ask(plan_run(config_of(made_model, *rows, f"training.vision_batch={batch}", *more)), made)
        return max(one.taken["handed"] for one in found.memory["text"].others)

    width = hidden_width(plan_run(config_of(made_model, *rows)).family)
    assert handed(mapped, "null") - handed(mapped, "1") == 3 * 2 * 64 * width * 4
    assert handed(copied, "null") == handed(copied, "1") == handed(mapped, "null", *FROZEN_TOWER)


def test_a_last_pass_of_fewer_micro_batches_takes_less(made_model: str) -> None:
    """Of four micro-batches in passes of three: the same work as in passes of two, in as many passes."""
    rows = (*ONE, "training.batch_size=8", "training.micro_batch_size=2")
    two, three = (ask(plan_run(config_of(made_model, *rows, f"training.vision_batch={batch}"))) for batch in (2, 3))
    assert two.passes == three.passes == {"vision": 2, "text": 4}
    assert three.busy_s["vision"] == pytest.approx(two.busy_s["vision"]) and three.step_s == pytest.approx(two.step_s)
    first, last = (s for s in three.timeline.spans if s.action.node.stage == "vision" and isinstance(s.action, Forward))
    assert (first.end_s - first.start_s) == pytest.approx(3 * (last.end_s - last.start_s))


def test_a_pass_deals_its_pictures_out_evenly(made_model: str) -> None:
    """A picture a micro-batch leaves one of two replicas without work; of a pass over all each has its half."""
    replicas = ("vision.num_actors=2", "vision.parallelism=data", "vision.zero_stage=0", "text.num_actors=1")
    rows = (*replicas, "text.tensor=1", "training.batch_size=4", "training.micro_batch_size=1")
    each, whole = (
        ask(plan_run(config_of(made_model, *rows, f"training.vision_batch={batch}"))) for batch in (1, "null")
    )
    assert each.busy_s["vision"] > 1.9 * whole.busy_s["vision"] > 0


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
    from dhp.plan.count.unit_work import TowerLoad, tower_operations

    plan = plan_run(config_of(made_model))
    counted, load = plan.counted, TowerLoad(512, 32768, 131072, 128, 2)
    exact = tower_operations(plan.family, counted.pieces, load)
    for found, own in zip(counted.tower_operations(load), exact, strict=True):
        assert found == pytest.approx(own)


def test_a_format_without_rates_is_refused(made_model: str) -> None:
    plan = plan_run(config_of(made_model, *ONE, "text.dtype=float64"))
    with pytest.raises(ConfigError, match="device=made has no rates in float64: known are float32"):
        ask(plan)


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


PART = PartConfig(num_actors=1, tensor=1, data=1, dtype="float32")
SHAPE = PartShape(1000, 1000, 1000)
COSTS = StageCosts(10, ("one", "two"), 5.0, 50.0, {at: {"none": LayerCost(100.0, 0.0, 0.0)} for at in ("one", "two")})
LAYER, END = InsideBytes(300.0, 20.0, 25.0), InsideBytes(7.0, 3.0, 4.0)
UNITS = Units(400, 200, 150)
PASSING = Passing(COSTS, ("none", "none"), StageInsides((LAYER, LAYER), END, END), units=UNITS)


def spec(data: int = 1) -> StageSpec:
    return StageSpec("text", "text", (range(2),), Degrees(data=data), True, range(data))


def moments(passing: Passing, part: PartConfig = PART, data: int = 1) -> dict[str, float]:
    """The most of each name, beyond weights and optimizer."""
    found = stage_memory(part, spec(data), SHAPE, passing, False)
    kept = found.states.weights + found.states.optimizer
    assert found.peak.total == max(one.total for one in found.others)
    return {one.name: one.total - kept for one in found.others}


def test_gradients_that_come_one_by_one_are_not_there_before() -> None:
    grown = replace(PASSING, grown=(0.0, 40.0, 440.0, 840.0))
    found = moments(grown)
    assert found[FORWARD] == 5 + 100 + 300 and found[LOSS] == 205 + 7
    assert found[BACKWARD] == 840 + 5 + 4  # what precedes the layers comes last, when all gradients are there
    assert moments(PASSING)[BACKWARD] == 4000 + 255 + 3  # ZeRO's have all their room from the beginning


def test_buckets_take_memory_as_they_fill_beside_the_gradients_that_fill_them() -> None:
    grown = replace(PASSING, grown=(40.0, 440.0, 840.0, 840.0), bucketed=80.0)
    assert moments(grown)[BACKWARD] == 4000 + 80  # the last one is copied when all sums have their room
    few = replace(grown, grown=(40.0, 5440.0, 5440.0, 5440.0), bucketed=0.0)
    assert moments(few)[BACKWARD] == 5440 + 205 + 20  # what autograd has made so far counts in a layer's own


def test_a_later_micro_batch_finds_the_gradients_of_those_before_it() -> None:
    found = moments(replace(PASSING, micro_batches=2, grown=(0.0, 40.0, 440.0, 840.0)))
    assert found[LOSS] == 4000 + 205 + 7
    assert found[BACKWARD] == 4000 + 255 + 3


def test_micro_batches_under_way_keep_what_they_were_handed() -> None:
    one, three = moments(PASSING), moments(replace(PASSING, holds=3.0, micro_batches=3, flown=11.0))
    assert three[LOSS] - one[LOSS] == 2 * (255 + 11)


def test_no_backward_has_forwards_alone() -> None:
    found = stage_memory(PART, spec(), SHAPE, replace(PASSING, costs=None), False)
    assert {one.name for one in found.others} == {FORWARD, LOSS, "update"} and found.activations == 0


@pytest.mark.parametrize(("stage", "forward", "backward"), [(1, 0, 4000), (2, 0, 4000), (3, 8000 + 3200, 8000)])
def test_deepspeed_has_a_bucket_of_all_gradients_and_keeps_what_it_gathered(
    stage: int, forward: int, backward: int
) -> None:
    part = replace(PART, zero_stage=stage, zero_engine="deepspeed", data=2)
    found = gathered_moments(part, SHAPE, UNITS, 2)
    assert (found.forward, found.backward) == (forward, backward)
    # What is gathered ahead, of the layers, is there twice in a forward.
    large = PartShape(1 << 30, 1 << 30, 0)
    assert gathered_moments(replace(part, zero_stage=1), large, UNITS, 2).backward == 4 * BUCKET_ELEMENTS


def test_deepspeeds_third_stage_copies_a_bucket_that_it_sums() -> None:
    """Behind the layers, or amid their backward where they fill several; gloo copies it once more."""
    part = replace(PART, zero_stage=3, zero_engine="deepspeed", data=2)
    shape = replace(SHAPE, small=50)  # which are whole all the time
    found, of_gloo = (gathered_moments(part, shape, UNITS, 2, cuda) for cuda in (True, False))
    assert (found.idle, found.backward) == (4000 + 200, 8000)
    assert (found.ending, of_gloo.ending) == (4200 + 800 + 4000, 4200 + 800 + 8000)  # the layers' weights are gone
    large = gathered_moments(part, PartShape(1 << 27, 1 << 27, 0), UNITS, 2)
    assert large.backward == 4 * (2 * BUCKET_ELEMENTS + (1 << 27))
    assert gathered_moments(replace(part, zero_stage=2), SHAPE, UNITS, 2).ending == 0
    moments = stage_memory(part, spec(2), SHAPE, PASSING, False)
    assert moments.peak.taken["gathered"] == 12800 and "inside" not in moments.peak.taken
    forward = next(one for one in moments.others if one.name == FORWARD)
    assert forward.taken["gradients"] == 2000  # its buffer is there from the beginning


def test_fsdp_gathers_a_layer_beside_the_one_that_computes() -> None:
    part = replace(PART, zero_stage=3, zero_engine="fsdp", data=2)
    found = gathered_moments(part, SHAPE, UNITS, 2)
    assert (found.forward, found.loss, found.after) == (4 * (200 + 800), 4 * 200, 4 * (200 + 400))
    assert found.last == 4 * (200 + 800 + 400 + 150)  # with the layer's gradients, and those behind the layers
    assert found.backward == found.last + 4 * 400 + 2 * 4 * 200  # sent of the layer before, and what came of it


ALONE, TARGETS, FEATURES = Degrees(), 20, 256


@pytest.mark.parametrize("choice", [slow("none"), "light", slow("all")])
def test_stages_keep_what_ranks_of_a_pipeline_count(four_layers_model: str, choice: str) -> None:
    case = Case(ALONE, ALONE, 1, "float32", packing=True, schedule="1f1b", stages=2)
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


def test_what_cannot_be_traced_is_said(four_layers_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing was counted yet

    def refused(*given: object, **more: object) -> None:
        raise ModelError("the text part of this model cannot be traced")

    monkeypatch.setattr("dhp.plan.count.counted_model.trace_layers", refused)
    config = config_of(four_layers_model, *PIPELINE, "data.cache_dir=null")
    found = expect(plan_run(config))
    assert found.forecast is None and "the text part of this model cannot be traced" in found.why


APART = ("cluster.collocate=false", "vision.num_actors=1", "vision.ulysses=1", "vision.zero_stage=0")


HANDOVER = 8e9  # bytes a second between two stages


def step_question(model: str, *overrides: str) -> Question:
    plan = plan_run(config_of(model, *PIPELINE, *APART, *overrides))
    loads = assumed_samples(plan.config, plan.family).loads(plan.config)
    return Question(plan, machine(handover=Channel(HANDOVER)), loads)


def step_of(model: str, *overrides: str) -> Timeline:
    return forecast(step_question(model, *overrides)).timeline


def seconds(timeline: Timeline, kind: type, stage: str) -> float:
    (found,) = {round(s.end_s - s.start_s, 12) for s in timeline.spans if s.action == kind(Node(stage), 0)}
    return found


def test_stages_take_what_their_layers_do(four_layers_model: str) -> None:
    timeline = step_of(four_layers_model, "text.cuts=[1]")
    first, last = (seconds(timeline, Forward, f"text.{at}") for at in range(2))
    assert last > 3.01 * first  # three layers, and the head
    back = [seconds(timeline, Backward, f"text.{at}") for at in range(2)]
    assert 2 * first < back[0] < 2.5 * first and 2 * last < back[1] < 2.5 * last  # attention's takes 2.5 forwards
    recomputed = step_of(four_layers_model, "text.cuts=[1]", "text.recompute=0")
    assert seconds(recomputed, Backward, "text.0") == pytest.approx(back[0] + first)
    assert seconds(recomputed, Backward, "text.1") == pytest.approx(back[1])


@pytest.mark.slow
def test_a_frozen_tower_has_no_backward_and_frozen_layers_less(four_layers_model: str) -> None:
    timeline = step_of(four_layers_model, "text.cuts=[2]", *FROZEN_TOWER)
    assert not any(span.action == Backward(Node("vision"), 0) for span in timeline.spans)
    trained = ("training.trainable=['layers.3']",)
    timeline = step_of(four_layers_model, "text.cuts=[2]", *FROZEN_TOWER, *trained)
    assert seconds(timeline, Backward, "text.1") < 0.8 * seconds(timeline, Forward, "text.1") * 2
    assert not any(span.action == Backward(Node("text.0"), 0) for span in timeline.spans)
    later = step_of(four_layers_model, "text.cuts=[3]", *FROZEN_TOWER, *trained)
    assert seconds(later, Backward, "text.1") == seconds(timeline, Backward, "text.1")  # layer 2 has no backward


def test_stages_of_a_tower_take_together_what_the_whole_takes(four_layers_model: str) -> None:
    whole = seconds(step_of(four_layers_model, "text.cuts=[2]"), Forward, "vision")
    staged = ("vision.parallelism=pipeline", "vision.num_actors=2", "vision.cuts=[1]")
    timeline = step_of(four_layers_model, "text.cuts=[2]", *staged)
    first, last = (seconds(timeline, Forward, f"vision.{at}") for at in range(2))
    assert first + last == pytest.approx(whole) and last > 1.5 * first
    assert {span.action.node.stage for span in timeline.spans} == {"vision.0", "vision.1", "text.0", "text.1"}


def test_the_better_cut_has_the_smaller_bubble(four_layers_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dhp.plan.cut.partition.expected_machine", lambda *given: machine())  # as the steps are played
    uneven, exact = (
        step_of(four_layers_model, f"text.{how}", *FROZEN_TOWER) for how in ("cuts=[1]", "partition=exact")
    )
    assert exact.step_s < uneven.step_s and exact.bubble < uneven.bubble


def test_the_lines_name_shares_of_the_step(four_layers_model: str) -> None:
    timeline = step_of(four_layers_model, "text.cuts=[1]")
    bubble, waiting = bubble_lines(timeline)
    assert bubble.startswith(f"bubble         {timeline.bubble:.0%} of the devices' time (vision ")
    waits = timeline.waits()["text.0"]["text.1"] / timeline.step_s
    assert waits > 0.1 and f"text.0 {waits:.0%} for text.1" in waiting


@pytest.mark.slow
def test_what_tower_stages_hand_on_takes_by_the_towers_own_bytes(four_layers_model: str) -> None:
    """Twice as wide an own format is twice as long on the way, and the decoder's does not count."""
    staged = ("vision.parallelism=pipeline", "vision.num_actors=2", "vision.cuts=[2]", "text.cuts=[2]")

    def on_the_way(*overrides: str) -> float:
        spans = {span.action: span for span in step_of(four_layers_model, *staged, *overrides).spans}
        sent, got = (spans[Forward(Node(f"vision.{at}"), 0)] for at in range(2))
        return got.start_s - sent.end_s

    plain = on_the_way()
    tower = load_family(four_layers_model).tower
    width = tower.config.vision_config.hidden_size
    assert plain == pytest.approx(4 * width * 4 * 1024 * tower.merge_unit / HANDOVER)  # four pictures in float32
    assert on_the_way("vision.dtype=bfloat16") == pytest.approx(plain / 2)
    assert on_the_way("text.dtype=bfloat16") == pytest.approx(plain)


def test_the_decoder_gets_a_row_for_each_token_of_a_picture(four_layers_model: str) -> None:
    spans = {span.action: span for span in step_of(four_layers_model, "text.cuts=[2]").spans}
    on_the_way = spans[Forward(Node("text.0"), 0)].start_s - spans[Forward(Node("vision"), 0)].end_s
    width = load_family(four_layers_model).config.get_text_config().hidden_size
    assert on_the_way == pytest.approx(4 * width * 4 * 1024 / HANDOVER)  # four pictures in float32


@pytest.mark.slow
def test_features_of_inner_layers_go_along(qwen3_vl_model: str) -> None:
    question = step_question(qwen3_vl_model, "text.cuts=[3]")
    plan = question.plan
    (edge,) = (edge for edge in plan.graph.edges if edge.source.stage == "vision")
    spans = {span.action: span for span in forecast(question).timeline.spans}
    on_the_way = spans[Forward(Node("text.0"), 0)].start_s - spans[Forward(Node("vision"), 0)].end_s
    width = plan.family.config.get_text_config().hidden_size
    assert len(edge.tensors) == 4 and on_the_way == pytest.approx(4 * 4 * width * 4 * 1024 / HANDOVER)


def test_a_step_is_drawn_with_seconds_to_scale(four_layers_model: str) -> None:
    question = step_question(four_layers_model, "text.cuts=[1]")
    whole = forecast(question)
    timeline = play_step(question, whole.stages, 2)
    head, *lines = timeline_lines(timeline, question.plan.graph, ())
    assert head.startswith("in time        a column is ") and [line.split()[0] for line in lines] == [
        "vision",
        "text.0",
        "text.1",
    ]
    assert max(map(len, lines)) <= 120
    count = lambda line: (len(line.split()) - 1, line.count("-"))
    assert count(lines[2])[1] > 2 * count(lines[1])[1]  # three layers and the head beside one
    assert timeline.step_s < whole.timeline.step_s
