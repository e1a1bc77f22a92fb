"""A step in assumed seconds: shares of work and waiting that follow by hand."""

from __future__ import annotations

import pytest

from dhp.core.graph import Node
from dhp.models.registry import load_family
from dhp.plan.count.rates import Channel
from dhp.plan.count.samples import assumed_samples
from dhp.plan.forecast.forecast import forecast, play_step
from dhp.plan.run_plan import Question, plan_run
from dhp.step.schedule import Backward, Forward
from dhp.step.timed import Timeline
from dhp.trainer.dry_run import bubble_lines, timeline_lines
from tests.plan.cut.test_partition import (
    FROZEN_TOWER,  # noqa: F401
    PIPELINE,
    config_of,
)
from tests.plan.made import machine

APART = ("cluster.collocate=false", "vision.num_actors=1", "vision.ulysses=1", "vision.zero_stage=0")


HANDOVER = 8e9  # bytes a second between two stages


def question_of(model: str, *overrides: str) -> Question:
    plan = plan_run(config_of(model, *PIPELINE, *APART, *overrides))
    loads = assumed_samples(plan.config, plan.family).loads(plan.config)
    return Question(plan, machine(handover=Channel(HANDOVER)), loads)


def step_of(model: str, *overrides: str) -> Timeline:
    return forecast(question_of(model, *overrides)).timeline


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


def test_the_better_cut_has_the_smaller_bubble(four_layers_model: str) -> None:
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


def test_features_of_inner_layers_go_along(qwen3_vl_model: str) -> None:
    question = question_of(qwen3_vl_model, "text.cuts=[3]")
    plan = question.plan
    (edge,) = (edge for edge in plan.graph.edges if edge.source.stage == "vision")
    spans = {span.action: span for span in forecast(question).timeline.spans}
    on_the_way = spans[Forward(Node("text.0"), 0)].start_s - spans[Forward(Node("vision"), 0)].end_s
    width = plan.family.config.get_text_config().hidden_size
    assert len(edge.tensors) == 4 and on_the_way == pytest.approx(4 * 4 * width * 4 * 1024 / HANDOVER)


def test_a_step_is_drawn_with_seconds_to_scale(four_layers_model: str) -> None:
    question = question_of(four_layers_model, "text.cuts=[1]")
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
