"""Which layers recompute, by counts and by measures."""

from collections import deque
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path

import pytest

from dhp.config.layout import CHOICES, read_choices
from dhp.core.reports import LayerUsage, StageUsage
from dhp.plan.count import costs as costs_of_count
from dhp.plan.count.costs import (
    Arrangement,
    LayerCost,
    StageCosts,
    plan_table,
    predicted_bytes,
    read_costs,
    write_costs,
)
from dhp.plan.recompute import profile
from dhp.plan.recompute.best_plan import best_plan, filled_plan
from dhp.plan.recompute.planner import PATIENCE, Planner, as_text, at_worst, probes
from dhp.plan.recompute.profile import Profile, fullest
from tests.plan.made import MIB, ROWS, arrangement, costs, probed, usage
from tests.plan.made import costs as costs_of_made

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


ALONE = arrangement(shared=False, outstanding=1, together=False)


def search(parts: dict[str, StageCosts], budget_mib: float, arrangement: Arrangement = ALONE) -> dict:
    start = {part: ("all",) * len(known.kinds) for part, known in parts.items()}
    return dict(best_plan(parts, start, frozenset(parts), arrangement, budget_mib * MIB))


def seconds(parts: dict[str, StageCosts], plan: dict) -> float:
    return sum(known.replay_s(plan[part]) for part, known in parts.items())


def test_much_memory_recomputes_nothing_and_little_everything() -> None:
    assert search({"text": costs(4)}, 1000) == {"text": ("none",) * 4}
    # The last layer needs its memory in any case, for its second run.
    assert search({"text": costs(4)}, 29) == {"text": ("all", "all", "all", "light")}
    assert search({"text": costs(4)}, 28.9) == {"text": ("offload", "all", "all", "light")}
    assert search({"text": costs(4)}, 20) == {"text": ("offload",) * 4}  # nothing fits; the least there is


def test_the_last_layers_keep_most() -> None:
    (choices,) = search({"text": costs(4)}, 80).values()
    held = [costs(4).layer(0, choice).held_bytes for choice in choices]
    assert held == sorted(held) and len(set(choices)) > 1


def test_a_budget_for_half_of_the_layers_is_better_spent_on_cheap_parts_of_all() -> None:
    parts = {"text": costs(8)}
    half = predicted_bytes(parts, {"text": ("all",) * 4 + ("none",) * 4}, ALONE)
    plan = search(parts, half / MIB)
    assert predicted_bytes(parts, plan, ALONE) <= half
    assert seconds(parts, plan) < 0.5 * seconds(parts, {"text": ("all",) * 4 + ("none",) * 4})


@pytest.mark.parametrize("budget_mib", [30, 45, 60, 80, 100, 120])
def test_close_to_the_best_of_all_plans(budget_mib: float) -> None:
    parts = {"text": costs(4, kinds=("only", "slow", "only", "slow"))}
    everything = seconds(parts, {"text": ("all",) * 4})
    best = min(
        seconds(parts, {"text": choices})
        for choices in product(CHOICES, repeat=4)
        if predicted_bytes(parts, {"text": choices}, ALONE) <= budget_mib * MIB
    )
    plan = search(parts, budget_mib)
    assert predicted_bytes(parts, plan, ALONE) <= budget_mib * MIB
    assert everything - seconds(parts, plan) >= 0.85 * (everything - best)


def test_shared_devices_share_by_seconds_saved_for_a_byte() -> None:
    """Text's layers save as much time in a quarter of the bytes."""
    parts = {"vision": costs(4), "text": costs(4, scale=0.25)}
    plan = search(parts, 70, IN_TURNS)
    assert predicted_bytes(parts, plan, IN_TURNS) <= 70 * MIB
    assert seconds({"text": parts["text"]}, plan) < seconds({"vision": parts["vision"]}, plan)


def test_devices_of_their_own_have_budgets_of_their_own() -> None:
    parts = {"vision": costs(4), "text": costs(4, scale=0.25)}
    plan = search(parts, 60)
    alone = {part: search({part: known}, 60)[part] for part, known in parts.items()}
    assert plan == alone


@pytest.mark.parametrize("budget_mib", [56, 64, 80])
@pytest.mark.parametrize(("layers", "scale"), [(6, 0.75), (3, 1.5), (4, 1.5)])
def test_on_devices_of_their_own_unequal_parts_do_not_weigh_each_other(
    budget_mib: float, layers: int, scale: float
) -> None:
    """Budgets that are tight for the one and wide for the other: a rate by both parts' peak would choose otherwise."""
    parts = {"vision": costs(4, kinds=("only", "slow", "only", "slow")), "text": costs(layers, scale=scale)}
    assert search(parts, budget_mib) == {part: search({part: known}, budget_mib)[part] for part, known in parts.items()}


def test_what_lies_below_the_peak_is_spent_on_seconds_for_a_byte_too() -> None:
    """Vision's peak is so high that text may keep 191 MiB more for nothing: eight thrifty layers, or one wide one."""
    peak = {"all": LayerCost(10 * MIB, 200 * MIB, 1.0)}
    wide, thrifty = (
        {"all": LayerCost(MIB, 0, seconds), "none": LayerCost(held * MIB, 0, 0.0)}
        for held, seconds in ((191, 1.0), (2, 0.9))
    )
    parts = {
        "vision": StageCosts(1, ("only",), 0, 0, {"only": peak}),
        "text": StageCosts(1, ("wide", *("thrifty",) * 8), 0, 0, {"wide": wide, "thrifty": thrifty}),
    }
    assert search(parts, 210, IN_TURNS) == {"vision": ("all",), "text": ("all", *("none",) * 8)}


def test_a_part_that_is_not_to_be_planned_stays() -> None:
    parts = {"vision": costs(2), "text": costs(2)}
    start = {"vision": ("mlp", "none"), "text": ("all", "all")}
    plan = best_plan(parts, start, frozenset({"text"}), ALONE, 1000 * MIB)
    assert plan == {"vision": ("mlp", "none"), "text": ("none", "none")}
    plan = best_plan(parts, start, frozenset({"text"}), ALONE, MIB)
    assert plan == {"vision": ("mlp", "none"), "text": ("offload", "offload")}


@pytest.mark.parametrize("budget_mib", [30, 60, 120, 200, 300, 500])
@pytest.mark.parametrize("kinds", [("only",) * 8, ("only", "slow") * 4])
def test_filling_by_whole_kinds_comes_near(budget_mib: float, kinds: tuple[str, ...]) -> None:
    parts = {"text": costs(8, kinds=kinds), "vision": costs(6)}
    start = {part: ("all",) * len(known.kinds) for part, known in parts.items()}
    everything = seconds(parts, start)
    most = max(budget_mib * MIB, predicted_bytes(parts, start, IN_TURNS))
    greedy = best_plan(parts, start, frozenset(parts), IN_TURNS, most)
    plan = filled_plan(parts, start, frozenset(parts), IN_TURNS, budget_mib * MIB)
    assert predicted_bytes(parts, plan, IN_TURNS) <= most
    assert everything - seconds(parts, plan) >= 0.7 * (everything - seconds(parts, greedy))


def test_filling_leaves_written_stages_alone() -> None:
    parts = {"text": costs(4), "vision": costs(4)}
    start = {"text": ("all",) * 4, "vision": ("mlp",) * 4}
    plan = filled_plan(parts, start, frozenset({"text"}), ALONE, 1000 * MIB)
    assert plan == {"text": ("none",) * 4, "vision": ("mlp",) * 4}


SHAPE = {"model": "small"}


@dataclass(frozen=True)
class WiderUsage(LayerUsage):
    """What a rank measures, and the bytes that its layer sends."""

    sent_bytes: int = 0
    sent_s: float = 0.0


@dataclass(frozen=True)
class WiderCost(LayerCost):
    sent_bytes: float = 0.0
    sent_s: float = 0.0


@pytest.fixture
def wider(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same lists as `dhp.plan.recompute.profile` makes of the class."""
    names = [field.name for field in fields(WiderCost)]
    for module in (costs_of_count, profile):
        monkeypatch.setattr(module, "LayerCost", WiderCost)
    monkeypatch.setattr(profile, "BYTES", tuple(name for name in names if name.endswith("_bytes")))
    monkeypatch.setattr(profile, "SECONDS", tuple(name for name in names if name.endswith("_s")))


def step_with_inputs(sent_bytes: int, sent_s: float) -> StageUsage:
    layer = WiderUsage("full", "none", 80, 40, 0.5, sent_bytes=sent_bytes, sent_s=sent_s)
    return StageUsage(
        peak_bytes=200,
        before_bytes=8,
        after_bytes=4,
        rows=4,
        all_rows=8,
        forward_s=1.0,
        backward_s=2.0,
        layers=(layer,),
    )


def test_a_cost_that_is_measured_is_the_plans(wider: None, tmp_path: Path) -> None:
    seen = Profile()
    for sent_bytes, sent_s in ((16, 1.0), (24, 2.0), (8, 9.0)):
        seen.add(step_with_inputs(sent_bytes, sent_s), timed=True)
    found = seen.costs()
    assert found is not None
    assert found.layer(0, "none") == WiderCost(80.0, 40.0, 0.5, 24.0, 2.0)  # the most, and the median
    write_costs(tmp_path, SHAPE, {"text": found})
    assert read_costs(tmp_path, SHAPE) == {"text": found}
    assert Profile(found).costs() == found


def test_a_file_that_lacks_a_cost_or_has_another_is_measured_anew(tmp_path: Path) -> None:
    known = StageCosts(4, ("full",), 8.0, 4.0, {"full": {"none": LayerCost(80.0, 40.0, 0.5)}})
    write_costs(tmp_path, SHAPE, {"text": known})
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text().replace("replay_s", "replays_s"))
    assert read_costs(tmp_path, SHAPE) is None


PROBE_KINDS = ("window", "full", "window", "full", "window", "full")


@pytest.mark.parametrize("kinds", [PROBE_KINDS, ("only",), ("only",) * 2, ("only",) * 40, ("full", *("window",) * 9)])
def test_every_kind_is_seen_under_every_choice(kinds: tuple[str, ...]) -> None:
    seen = {(kind, "all") for kind in kinds}
    for choices in probed(kinds):
        assert len(choices) == len(kinds)
        seen |= set(zip(kinds, choices, strict=True))
    assert seen == {(kind, choice) for kind in kinds for choice in CHOICES}


def test_they_take_few_steps_and_little_memory() -> None:
    (choices,) = probed(("only",) * 32)
    assert choices == ("all",) * 27 + ("offload", "linear", "mlp", "light", "none")


def test_the_first_layer_changes_only_where_its_kind_has_no_other() -> None:
    """It holds what all layers share, which would be counted for its choice."""
    assert {choices[0] for choices in probed(("only",) * 3)} == {"all"}
    assert {choices[0] for choices in probed(("full", "window", "window"))} >= set(CHOICES) - {"all"}


def first_seen(known: StageCosts) -> StageCosts:
    """What there is to know after a step that recomputed everything."""
    layers = {kind: {"all": of["all"]} for kind, of in known.layers.items()}
    return StageCosts(ROWS, known.kinds, known.before_bytes, known.after_bytes, layers)


@pytest.mark.parametrize("choice", CHOICES)
def test_no_choice_takes_more_than_its_bound(choice: str) -> None:
    known = costs_of_made(6, kinds=PROBE_KINDS)
    bound = at_worst({"text": first_seen(known)})["text"]
    for at in range(6):
        choices = ("all",) * at + (choice,) + ("all",) * (5 - at)
        assert known.peak_bytes(choices) <= bound.peak_bytes(choices)
    assert bound.layers["full"].keys() == set(CHOICES)
    fixed = StageCosts(ROWS, ("only",), 0.0, 0.0, {"only": {"mlp": known.layers["full"]["mlp"]}})
    assert at_worst({"text": fixed})["text"] == fixed  # of what was never recomputed whole nothing follows


@pytest.mark.parametrize(
    ("room_mib", "steps"),
    [(200, 1), (70, 2), (48, 4), (35, 4), (34, 1), (20, 1)],  # 35: of which one layer keeps all
)
def test_what_would_not_fit_is_never_tried(room_mib: int, steps: int) -> None:
    """The fewer fit at a time, the more steps; where not even one layer fits, its choices stay unknown."""
    real = {"text": costs_of_made(8)}
    bounds = at_worst({"text": first_seen(real["text"])})
    everything = {"text": ("all",) * 8}

    def fits(plan: dict[str, tuple[str, ...]]) -> bool:
        return predicted_bytes(bounds, plan, IN_TURNS) <= room_mib * MIB

    plans, untried = probes({"text": real["text"].kinds}, everything, fits)
    kept = {choice for plan in plans for choice in plan["text"]}
    assert (len(plans), kept | {choice for _, choice in untried}) == (steps, set(CHOICES))
    assert kept.isdisjoint(choice for _, choice in untried)
    for plan in plans:
        assert "offload" in kept
        tried = set(plan["text"]) - {"all", "offload"}
        assert not tried or predicted_bytes(real, plan, IN_TURNS) <= room_mib * MIB
    assert bool(untried) == (room_mib < 35)


def test_stages_on_one_device_share_what_there_is() -> None:
    real = {"vision": costs_of_made(6), "text": costs_of_made(6)}
    bounds = at_worst({stage: first_seen(known) for stage, known in real.items()})
    everything = {stage: ("all",) * 6 for stage in real}
    apart = arrangement(shared=False, outstanding=1, together=True)
    found = {}
    for name, arranged in {"apart": apart, "shared": arrangement(True, 1, together=True)}.items():
        most = predicted_bytes(bounds, everything, arranged) + 24 * MIB
        plans, untried = probes(
            {stage: known.kinds for stage, known in real.items()},
            everything,
            lambda plan, most=most, arranged=arranged: predicted_bytes(bounds, plan, arranged) <= most,
        )
        found[name] = len(plans)
        assert not untried
    assert found["apart"] < found["shared"]


PROFILE_KINDS = ("window", "full", "window", "full", "window", "full")


def test_costs_come_back() -> None:
    known = costs_of_made(6, kinds=PROFILE_KINDS)
    profile = Profile()
    for choices in (("all",) * 6, *probed(PROFILE_KINDS)):
        profile.add(usage(known, choices), timed=True)
    found = profile.costs()
    for choices in (("none",) * 6, ("all", "light", "mlp", "none", "none", "linear")):
        assert found.peak_bytes(choices) == pytest.approx(known.peak_bytes(choices), abs=0.01)  # not a byte off
        assert found.replay_s(choices) == pytest.approx(known.replay_s(choices))


def test_larger_micro_batches_scale_what_smaller_ones_showed() -> None:
    known = costs_of_made(4)
    profile = Profile()
    profile.add(usage(known, ("all",) * 4), timed=True)
    for choices in probed(known.kinds):
        profile.add(usage(known, choices, rows=ROWS // 2), timed=True)
    found = profile.costs()
    assert found.rows == ROWS
    assert found.peak_bytes(("none",) * 4) == pytest.approx(known.peak_bytes(("none",) * 4))


def test_what_all_layers_share_is_counted_once() -> None:
    known = costs_of_made(4)
    seen = usage(known, ("all",) * 4)
    first = replace(seen.layers[0], held_bytes=seen.layers[0].held_bytes + 7 * MIB)
    profile = Profile()
    profile.add(replace(seen, layers=(first, *seen.layers[1:])), timed=True)
    found = profile.costs()
    assert found.before_bytes == pytest.approx(known.before_bytes + 7 * MIB, abs=0.01)
    assert found.layer(0, "all").held_bytes == pytest.approx(known.layer(0, "all").held_bytes, abs=0.01)


def test_what_any_layer_holds_beyond_others_alike_counts_once() -> None:
    """As the merger of an inner layer's states: were it its kind's, each layer would be taken to hold it."""
    known = costs_of_made(3)
    seen = usage(known, ("all",) * 3)
    more = [replace(one, held_bytes=one.held_bytes + extra) for one, extra in zip(seen.layers, (7, 0, 5), strict=True)]
    profile = Profile()
    profile.add(replace(seen, layers=tuple(more)), timed=True)
    found = profile.costs()
    assert found.before_bytes == pytest.approx(known.before_bytes + 7 + 5, abs=0.01)
    assert found.layer(2, "all").held_bytes == pytest.approx(known.layer(2, "all").held_bytes, abs=0.01)


def test_a_layer_alone_with_its_choice_has_all_that_it_holds() -> None:
    known = costs_of_made(3)
    seen = usage(known, ("all", "none", "all"))
    more = [replace(one, held_bytes=one.held_bytes + extra) for one, extra in zip(seen.layers, (7, 4, 0), strict=True)]
    profile = Profile()
    profile.add(replace(seen, layers=tuple(more)), timed=True)
    found = profile.costs()
    assert found.before_bytes == pytest.approx(known.before_bytes + 7, abs=0.01)
    assert found.layer(1, "none").held_bytes == pytest.approx(known.layer(1, "none").held_bytes + 4, abs=0.01)


def test_seconds_of_a_first_step_do_not_count() -> None:
    known = costs_of_made(2)
    profile = Profile()
    slow = usage(known, ("all", "all"))
    profile.add(replace(slow, layers=tuple(replace(one, replay_s=100.0) for one in slow.layers)), timed=False)
    profile.add(slow, timed=True)
    assert profile.costs().layer(0, "all").replay_s == pytest.approx(1.0)


def test_nothing_seen_costs_nothing() -> None:
    assert Profile().costs() is None


def test_known_costs_are_refined_by_what_comes() -> None:
    known = costs_of_made(4)
    profile = Profile(known)
    assert profile.costs().peak_bytes(("mlp",) * 4) == pytest.approx(known.peak_bytes(("mlp",) * 4))
    profile.add(usage(known, ("mlp",) * 4, rows=2 * ROWS), timed=True)
    assert profile.costs().peak_bytes(("mlp",) * 4) == pytest.approx(2 * known.peak_bytes(("mlp",) * 4))


def test_seconds_that_are_known_are_of_a_step_whatever_its_micro_batches() -> None:
    known = costs_of_made(4)
    profile = Profile(known)
    profile.add(usage(known, ("mlp",) * 4, rows=2 * ROWS), timed=True)
    assert profile.costs().layer(0, "all").replay_s == known.layer(0, "all").replay_s > 0
    assert profile.costs().layer(0, "all").held_bytes == 2 * known.layer(0, "all").held_bytes


def test_the_fullest_rank_decides() -> None:
    small, large = (usage(costs_of_made(1), ("all",), rows=rows) for rows in (ROWS, 2 * ROWS))
    assert fullest([small, large, small]) is large
