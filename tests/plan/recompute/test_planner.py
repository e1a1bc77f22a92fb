"""The four steps, played through with reports that are made up."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from dhp.config.layout import read_choices
from dhp.core.reports import StageUsage
from dhp.plan.count.costs import StageCosts, plan_table, predicted_bytes
from dhp.plan.recompute.planner import PATIENCE, Planner, as_text
from tests.plan.made import MIB, arrangement, costs, usage

IN_TURNS = arrangement(shared=True, outstanding=1, together=False)
REAL = {"vision": costs(6, kinds=("window", "full") * 3), "text": costs(8)}
KINDS = {part: known.kinds for part, known in REAL.items()}


def step(planner: Planner, real: dict[str, StageCosts] = REAL, factor: float = 1.0) -> bool:
    return planner.learn({part: usage(known, planner.asked[part], factor=factor) for part, known in real.items()})


def settled(planner: Planner) -> int:
    """Steps until there is a plan."""
    for steps in range(1, 20):
        step(planner)
        if planner.settled:
            return steps
    raise AssertionError("no plan after 20 steps")


@pytest.mark.parametrize(
    ("layers", "room_mib", "wanted"),
    [(2, 150, 12), (3, 150, 8), (4, 150, 6), (6, 150, 4), (8, 150, 4), (8, 70, 6), (8, 48, 10), (8, 20, 4)],
)
def test_steps_that_measure_while_one_is_always_submitted_ahead(layers: int, room_mib: int, wanted: int) -> None:
    """As docs/performance.md says."""
    known = costs(layers)
    planner = Planner({"text": known.kinds}, {}, IN_TURNS, room_mib * MIB)
    submitted, steps = deque([planner.asked]), 0
    while not planner.settled:
        submitted.append(planner.asked)
        planner.learn({"text": usage(known, submitted.popleft()["text"])})
        steps += 1
    assert steps == wanted


def test_all_four_steps() -> None:
    planner = Planner(KINDS, {}, IN_TURNS, 150 * MIB)
    assert planner.asked == {"vision": ("all",) * 6, "text": ("all",) * 8}
    assert not step(planner)  # the first step's seconds say nothing
    assert step(planner)
    assert planner.asked["text"] == ("all",) * 3 + ("offload", "linear", "mlp", "light", "none")
    assert settled(planner) <= 4
    assert predicted_bytes(REAL, planner.asked, IN_TURNS) <= 150 * MIB
    assert planner.predicted_bytes() == pytest.approx(predicted_bytes(REAL, planner.asked, IN_TURNS))
    assert planner.saved_s() > 0
    assert not step(planner)  # it fits, so it stays


def test_everything_is_measured_before_the_probes_and_never_after() -> None:
    """Only then may the budget still be measured."""
    planner = Planner(KINDS, {}, IN_TURNS, 150 * MIB)
    assert planner.measures_everything
    step(planner)
    assert planner.measures_everything
    step(planner)
    assert not planner.measures_everything
    settled(planner)
    assert not planner.measures_everything
    tight = Planner(KINDS, {}, IN_TURNS, 1 * MIB)  # its plan may be to recompute everything
    settled(tight)
    assert not tight.measures_everything


def test_seconds_of_the_first_step_do_not_count_and_its_bytes_do() -> None:
    """Whatever is compiled, mapped or found out in the first step would make what it recomputes look dear."""
    planner = Planner(KINDS, {}, IN_TURNS, 150 * MIB)
    first = {part: usage(known, planner.asked[part]) for part, known in REAL.items()}
    slow = {
        part: replace(told, layers=tuple(replace(layer, replay_s=100.0) for layer in told.layers))
        for part, told in first.items()
    }
    assert not planner.learn(slow)
    assert all(costs.replay_s(("all",) * len(costs.kinds)) == 0 for costs in planner.costs().values())
    step(planner)
    for part, known in REAL.items():
        everything = ("all",) * len(known.kinds)
        found = planner.costs()[part]
        # Seconds are kept for each row, of which a step has four times as many as its largest micro-batch.
        assert found.replay_s(everything) == pytest.approx(known.replay_s(everything))
        assert found.peak_bytes(everything) == pytest.approx(known.peak_bytes(everything))


def test_a_plan_that_takes_more_than_the_budget_is_corrected() -> None:
    planner = Planner(KINDS, {}, IN_TURNS, 150 * MIB)
    settled(planner)
    first = planner.asked
    assert step(planner, factor=1.3)
    assert planner.asked != first
    raw = predicted_bytes(REAL, planner.asked, IN_TURNS)
    assert 1.2 * raw <= 150 * MIB
    assert 1.2 * raw <= planner.predicted_bytes() <= 1.3001 * raw  # what vision holds meanwhile is as predicted
    for _ in range(3):
        step(planner, factor=1.3)
    last = planner.measured_bytes({part: usage(known, planner.asked[part], factor=1.3) for part, known in REAL.items()})
    assert last <= 150 * MIB


def test_steps_that_were_on_their_way_when_the_plan_changed_decide_nothing() -> None:
    planner = Planner(KINDS, {}, IN_TURNS, 150 * MIB)
    before = planner.asked
    step(planner)
    step(planner)
    asked = planner.asked
    late: dict[str, StageUsage | None] = {part: usage(known, before[part]) for part, known in REAL.items()}
    assert not planner.learn(late)
    assert planner.asked == asked


def test_what_does_not_fit_at_all_goes_to_the_host() -> None:
    planner = Planner(KINDS, {}, IN_TURNS, 1 * MIB)
    settled(planner)
    assert planner.asked == {"vision": ("offload",) * 6, "text": ("offload",) * 8}
    assert planner.predicted_bytes() > 1 * MIB
    assert not step(planner)


def test_what_turns_out_not_to_fit_goes_to_the_host_as_far_as_it_must() -> None:
    planner = Planner(KINDS, {}, IN_TURNS, 45 * MIB)
    settled(planner)
    assert "offload" not in {*planner.asked["vision"], *planner.asked["text"]}
    assert step(planner, factor=1.3)
    first = planner.asked["text"].count("offload") + planner.asked["vision"].count("offload")
    assert 0 < first < 14
    assert planner.predicted_bytes() <= 45 * MIB


def peak(planner: Planner) -> float:
    """Bytes that `asked` takes."""
    return predicted_bytes(REAL, planner.asked, IN_TURNS)


def test_a_measuring_step_that_runs_out_of_memory_is_answered_by_recomputing_more() -> None:
    planner = Planner(KINDS, {}, IN_TURNS, 150 * MIB)
    step(planner)
    everything, least = dict(planner.asked), peak(planner)
    step(planner)
    for times in range(1, 16):  # until hardly anything of the budget counts
        planner.run_short()
        assert planner.asked == everything and not planner.settled
        step(planner)
        assert peak(planner) <= max(least, 150 * MIB / 1.1**times)
    settled(planner)
    assert planner.untried and peak(planner) <= least


def test_a_plan_that_runs_out_of_memory_is_answered_by_recomputing_more() -> None:
    planner = Planner(KINDS, {}, IN_TURNS, 150 * MIB)
    settled(planner)
    offloaded = {stage: ("offload",) * len(of) for stage, of in KINDS.items()}
    for _ in range(40):
        before, asked = peak(planner), planner.asked
        planner.run_short()
        assert planner.settled and peak(planner) <= before and (planner.asked != asked or asked == offloaded)
    assert planner.asked == offloaded


def test_what_the_user_fixed_stays() -> None:
    planner = Planner(KINDS, {"vision": ("light",) * 6}, IN_TURNS, 180 * MIB)
    settled(planner)
    assert planner.asked["vision"] == ("light",) * 6
    assert set(planner.asked["text"]) != {"all"}
    assert predicted_bytes(REAL, planner.asked, IN_TURNS) <= 180 * MIB


def test_known_costs_give_a_plan_before_the_first_step() -> None:
    planner = Planner(KINDS, {}, IN_TURNS, 150 * MIB, known=REAL)
    assert planner.settled
    measured = Planner(KINDS, {}, IN_TURNS, 150 * MIB)
    settled(measured)
    assert planner.predicted_bytes() <= 150 * MIB
    assert set(planner.asked["text"]) == set(measured.asked["text"])


def test_data_without_images_does_not_hold_up_text() -> None:
    planner = Planner(KINDS, {}, IN_TURNS, 150 * MIB)
    for _ in range(PATIENCE + 8):
        planner.learn({"vision": None, "text": usage(REAL["text"], planner.asked["text"])})
    assert planner.settled
    assert planner.asked["vision"] == ("all",) * 6
    assert set(planner.asked["text"]) != {"all"}


def test_steps_without_any_work_measure_nothing() -> None:
    planner = Planner(KINDS, {}, IN_TURNS, 150 * MIB)
    asked = planner.asked
    for _ in range(PATIENCE + 8):
        assert not planner.learn({"vision": None, "text": None})
    assert planner.asked == asked and not planner.settled
    assert settled(planner) <= 5


def only_text(planner: Planner, steps: int) -> None:
    for _ in range(steps):
        planner.learn({"vision": None, "text": usage(REAL["text"], planner.asked["text"])})


def test_a_part_whose_first_work_comes_late_is_measured_then() -> None:
    planner = Planner(KINDS, {}, IN_TURNS, 150 * MIB)
    only_text(planner, PATIENCE + 8)
    assert planner.settled and set(planner.costs()) == {"text"}
    assert step(planner) and not planner.settled
    assert planner.asked == {"vision": ("all",) * 6, "text": ("all",) * 8}
    settled(planner)
    assert set(planner.asked["vision"]) != {"all"} and set(planner.costs()) == {"vision", "text"}
    assert predicted_bytes(REAL, planner.asked, IN_TURNS) <= 150 * MIB
    assert not step(planner)


def test_a_part_whose_first_work_comes_in_a_probe_is_measured_after_it() -> None:
    """Nothing is known of what it would keep, so no probe lets it keep anything yet."""
    planner = Planner(KINDS, {}, IN_TURNS, 150 * MIB)
    only_text(planner, PATIENCE + 1)
    assert not planner.settled and planner.asked["text"] != ("all",) * 8
    assert planner.asked["vision"] == ("all",) * 6
    step(planner)
    only_text(planner, 4)
    assert planner.settled and planner.asked["vision"] == ("all",) * 6
    assert step(planner) and not planner.settled
    settled(planner)
    assert set(planner.asked["vision"]) != {"all"}
    assert predicted_bytes(REAL, planner.asked, IN_TURNS) <= 150 * MIB


@pytest.mark.parametrize("budget_mib", [25, 34, 42, 50, 70, 100, 150, 400])
def test_no_step_takes_more_than_the_budget_where_it_holds_everything_recomputed(budget_mib: int) -> None:
    """A step that runs out of memory is not survived, so none is tried that could."""
    planner = Planner(KINDS, {}, IN_TURNS, budget_mib * MIB)
    base = predicted_bytes(REAL, planner.asked, IN_TURNS)
    for _ in range(30):
        assert predicted_bytes(REAL, planner.asked, IN_TURNS) <= max(budget_mib * MIB, base)
        step(planner)
    assert planner.settled
    assert bool(planner.untried) == (budget_mib < 66)  # 44, and 22 that a layer of vision may keep meanwhile


def test_costs_of_a_run_without_images_are_no_plan_for_one_with_them() -> None:
    planner = Planner(KINDS, {}, IN_TURNS, 150 * MIB, known={"text": REAL["text"]})
    assert not planner.settled and planner.asked["text"] == ("all",) * 8
    fixed = Planner(KINDS, {"vision": ("light",) * 6}, IN_TURNS, 180 * MIB, known={"text": REAL["text"]})
    assert fixed.settled


@pytest.mark.parametrize("choices", [("none",) * 5, ("all",) * 5, ("all", "all", "light", "none", "mlp")])
def test_a_plan_in_the_words_of_the_configuration(choices: tuple[str, ...]) -> None:
    assert read_choices(as_text(choices), 5) == choices


def test_the_table_counts_layers_and_can_be_copied_into_a_configuration() -> None:
    plan = {"vision": ("all", "light") * 3, "text": ("mlp",) * 2 + ("none",) * 6}
    table = "\n".join(plan_table(REAL, plan))
    assert "text    causal" not in table and "only" in table and "23.0 MiB" in table
    assert as_text(plan["text"]) == "mlp:0-1,none:2-7"
