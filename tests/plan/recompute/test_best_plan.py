"""The plan that a budget admits, against trying all of them."""

from __future__ import annotations

from itertools import product

import pytest

from dhp.config.layout import CHOICES
from dhp.plan.count.costs import Arrangement, LayerCost, StageCosts, predicted_bytes
from dhp.plan.recompute.best_plan import best_plan, filled_plan
from tests.plan.made import MIB, arrangement, costs

ALONE = arrangement(shared=False, outstanding=1, together=False)
IN_TURNS = arrangement(shared=True, outstanding=1, together=False)


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
