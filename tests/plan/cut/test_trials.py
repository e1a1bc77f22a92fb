"""Cuts by what layers take in steps of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from dhp.core.errors import ConfigError
from dhp.core.reports import LayerUsage, StageReport, StageUsage
from dhp.plan.count.counted_model import count_model
from dhp.plan.cut.partition import LayerCuts, first_backwards, part_cuts
from dhp.plan.cut.trials import Measured, PartTimes, Trials, TrialStep, UnitTimes, median_times, timed, unit_times
from tests.helpers.graphs import make_graph
from tests.plan.cut.made import unit
from tests.plan.cut.test_partition import PIPELINE, config_of, round_rates  # noqa: F401  # a fixture for all tests


def report(forward_s: float, backward_s: float, *layers: float) -> StageReport:
    taken = tuple(LayerUsage("full", "none", 0, 0, 0.0, seconds) for seconds in layers)
    return StageReport(0, None, 0.0, {}, None, {}, StageUsage(0, 0, 0, 1, 1, forward_s, backward_s, taken))


def test_units_have_their_seconds_of_a_micro_batch_and_rank() -> None:
    """Three stages of two, two and one layer, two micro-batches; of the second stage one rank had no work."""
    graph = make_graph(stages=3, layers=5, cuts=(2, 4), tower_layers=1)
    idle = StageReport(1, None, 0.0, {}, None, {})
    reports = {
        "vision": [report(4.0, 0.0, 3.0)],
        "text.0": [report(8.0, 16.0, 2.0, 4.0)],
        "text.1": [report(12.0, 24.0, 6.0, 4.0), idle],
        "text.2": [report(10.0, 10.0, 8.0)],
    }
    times = unit_times(graph, reports, Measured(2, {"vision": 0, "text": 0}))
    assert times["vision"] == (UnitTimes(0, 0), UnitTimes(1.5, 0), UnitTimes(0.5, 0))  # the merger has the rest
    assert times["text"] == (
        UnitTimes(1.0, 2.0),  # the embedding: what the first stage took beside its layers
        UnitTimes(1.0, 2.0),
        UnitTimes(2.0, 4.0),
        UnitTimes((6 + 1) / 4, (6 + 1) / 2),  # two ranks, two micro-batches; the rest is both layers'
        UnitTimes((4 + 1) / 4, (4 + 1) / 2),
        UnitTimes(4.0, 4.0),
        UnitTimes(1.0, 1.0),  # the head
    )


def test_a_stage_without_work_took_nothing() -> None:
    reports = {"vision": [StageReport(0, None, 0.0, {}, None, {})], "text": [report(1.0, 1.0, *[0.25] * 4)]}
    times = unit_times(make_graph(), reports, Measured(1, {"vision": 0, "text": 0}))
    assert set(times["vision"]) == {UnitTimes(0.0, 0.0)} and times["text"][1] == UnitTimes(0.25, 0.25)


def test_backward_is_shared_by_the_units_through_which_it_goes() -> None:
    """A frozen tower with a trained merger: all of it is the merger's."""
    reports = {"vision": [report(5.0, 2.0, 1.0, 1.0, 1.0, 1.0)], "text": [report(4.0, 8.0, *[1.0] * 4)]}
    times = unit_times(make_graph(), reports, Measured(1, {"vision": 5, "text": 3}))
    assert [one.backward_s for one in times["vision"]] == [0, 0, 0, 0, 0, 2.0]
    assert [one.backward_s for one in times["text"]] == [0, 0, 0, 4.0, 4.0, 0]


def test_what_a_plan_will_decide_counts_for_nothing() -> None:
    again = replace(report(4.0, 8.0, *[1.0] * 4), usage=StageUsage(0, 0, 0, 1, 1, 4.0, 8.0, tuple(
        LayerUsage("full", "all", 0, 0, 1.0, 1.0) for _ in range(4))))  # fmt: skip
    reports = {"vision": [report(1.0, 1.0, *[0.25] * 4)], "text": [again]}
    firsts = {"vision": 0, "text": 0}
    planned = unit_times(make_graph(), reports, Measured(1, firsts, frozenset({"text"})))
    assert [one.backward_s for one in planned["text"]] == [0, 1, 1, 1, 1, 0]
    assert unit_times(make_graph(), reports, Measured(1, firsts))["text"][1].backward_s == 2


def test_a_backward_begins_where_something_is_trained(four_layers_model: str) -> None:
    frozen = ("training.trainable=['layers.3']", "training.frozen=[vision,projector]", "vision.zero_stage=0")
    for given, text in (((), 0), (frozen, 4)):
        config = config_of(four_layers_model, *PIPELINE, *given)
        found = first_backwards(config, count_model(config, four_layers_model))
        assert found["text"] == text and (found["vision"] == 0) == (not given)


def test_the_median_step_counts() -> None:
    steps = [TrialStep(1.0, {"text": (UnitTimes(a, b),)}) for a, b in ((3.0, 1.0), (1.0, 9.0), (2.0, 2.0))]
    assert median_times(steps) == {"text": (UnitTimes(2.0, 2.0),)}
    (own,) = timed((unit(forward_s=7.0, output_bytes=5.0),), median_times(steps))
    assert (own.forward_s, own.backward_s, own.output_bytes) == (2.0, 2.0, 5.0)


def text_times(*forwards: float) -> PartTimes:
    """Of an embedding, the layers and a head; backward takes twice as long."""
    return {"text": tuple(UnitTimes(one, 2 * one) for one in forwards)}


def tried(
    model: str, times: PartTimes, of_cuts: Mapping[tuple[int, ...], Sequence[TrialStep]], wall: bool, method: str
) -> tuple[LayerCuts, list[tuple[int, ...]]]:
    """The cuts of four layers in two stages, and those that were tried."""
    seen: list[tuple[int, ...]] = []

    def run(cuts: Mapping[str, Sequence[int]]) -> Sequence[TrialStep]:
        seen.append(tuple(cuts["text"]))
        return of_cuts.get(seen[-1], [])

    config = config_of(model, *PIPELINE, f"text.partition={method}", "text.partition_trials=true")
    return part_cuts(config, count_model(config, model), trials=Trials(times, run, wall))["text"], seen


def test_layers_are_cut_by_their_measured_seconds(four_layers_model: str) -> None:
    slow_first, slow_last = text_times(0, 9, 1, 1, 1, 0), text_times(0, 1, 1, 1, 9, 0)
    for times, cut in ((slow_first, 1), (slow_last, 3)):
        found, seen = tried(four_layers_model, times, {}, True, "exact")
        assert found.cuts == (cut,) and not seen and found.why.endswith(", by measured seconds of layers")


def test_the_candidate_whose_steps_are_fastest_is_taken(four_layers_model: str) -> None:
    """By their own seconds, or by what their layers took, played through the schedule."""
    even, late = text_times(0, 1, 1, 1, 1, 0), text_times(0, 1, 1, 1, 9, 0)
    steps = {(cut,): [TrialStep(float(seconds), even)] * 3 for cut, seconds in ((1, 5), (2, 4), (3, 3))}
    found, seen = tried(four_layers_model, even, steps, True, "bmp")
    assert found.cuts == (3,) and sorted(seen) == [(1,), (2,), (3,)]
    assert tried(four_layers_model, even, steps, False, "bmp")[0].cuts == (2,)
    steps = {cuts: [TrialStep(1.0, late)] for cuts in steps}
    assert tried(four_layers_model, even, steps, False, "bmp")[0].cuts == (3,)


def test_a_candidate_that_does_not_fit_is_none(four_layers_model: str) -> None:
    even = text_times(0, 1, 1, 1, 1, 0)
    assert tried(four_layers_model, even, {(1,): [TrialStep(9.0, even)]}, True, "bmp")[0].cuts == (1,)
    with pytest.raises(ConfigError, match="none of the 3 candidates"):
        tried(four_layers_model, even, {}, True, "bmp")


OF_SEARCHES = "partition_trials=true is for text.partition=exact or bmp"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["text.partition=parameters"], OF_SEARCHES),
        (["text.cuts=[2]"], OF_SEARCHES),
        (["vision.partition_trials=true", "text.partition_trials=false"], OF_SEARCHES),
        (["training.schedule=interleaved", "text.virtual_stages=2"], OF_SEARCHES),
        (["training.schedule=sequential"], "under which every cut takes as long"),
        (["text.pipeline=1", "text.parallelism=data"], "no part has several stages"),
        (["text.compile=true"], "text.compile=true with text.partition_trials=true"),
    ],
)
def test_trials_that_would_say_nothing_are_refused(four_layers_model: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(four_layers_model, *PIPELINE, "text.partition_trials=true", *overrides)
