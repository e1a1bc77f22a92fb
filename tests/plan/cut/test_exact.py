"""The search against every cut and every choice, and its bound against simulation."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from dhp.core.errors import ConfigError
from dhp.plan.cut import exact as searched
from dhp.plan.cut.exact import critical, exact, nothing_elsewhere
from dhp.plan.cut.problem import PartitionProblem, bounds_of
from dhp.plan.cut.run_tables import all_cuts, choices_of, make_tables, needed_bytes, steps_of
from dhp.plan.cut.units import StageLink
from tests.plan.cut.made import chain, cuts_of, problem, programs, unit, with_choice


def step_of(asked: PartitionProblem, cuts: tuple[int, ...]) -> float:
    """One cut by itself, without a budget."""
    at = {int(position): index for index, position in enumerate(asked.positions.at)}
    rows = np.array([[at[cut] for cut in cuts]], dtype=int).reshape(1, -1)
    return float(steps_of(asked, make_tables(asked), rows)[0])


def taken(asked: PartitionProblem, cuts: tuple[int, ...], choices: tuple[str, ...]) -> list[float]:
    """Bytes of each stage, as the module's words say: states, what all in flight keep, the largest replay."""
    found = []
    for count, (first, end) in zip(asked.in_flight, bounds_of(asked, cuts), strict=True):
        back = range(max(first, asked.first_back), end)
        kept = [asked.units[at].saved[choices[at]] for at in back]
        again = any(choices[at] != "none" for at in back)
        replay = max((one.replay_bytes for at in back for one in asked.units[at].saved.values()), default=0.0)
        states = sum(one.states_bytes for one in asked.units[first:end])
        found.append(states + count * sum(one.held_bytes for one in kept) + replay * again)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_no_cut_and_no_choice_is_faster(seed: int) -> None:
    """Five units, three stages: every cut with every choice of every unit."""
    free = problem(seed, 5, 3, 4)
    budget = round(needed_bytes(free) + 9)
    asked = replace(free, budget_bytes=budget)
    best = np.inf
    for cuts in cuts_of(asked):
        for choices in product(("none", "light", "all"), repeat=5):
            if max(taken(asked, cuts, choices)) <= budget:
                best = min(best, step_of(with_choice(asked, choices), cuts))
    found = exact(asked)
    assert found.step_s == pytest.approx(best, rel=1e-12)
    assert max(taken(asked, found.cuts, found.recompute)) <= budget
    assert step_of(with_choice(asked, found.recompute), found.cuts) == pytest.approx(found.step_s, rel=1e-12)
    assert found.gap == 0 and found.step_s > exact(free).step_s - 1e-12


@pytest.mark.parametrize("stages", [1, 2, 4, 5])
@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_best_of_all_cuts(seed: int, stages: int) -> None:
    asked = problem(seed, 13, stages, stages * (1 + seed % 3), float("inf"))
    every = {cuts: step_of(asked, cuts) for cuts in cuts_of(asked)}
    found = exact(asked)
    assert found.step_s == pytest.approx(min(every.values()), rel=1e-12)
    assert every[found.cuts] == pytest.approx(found.step_s, rel=1e-12)
    assert found.gap == 0 and len(all_cuts(asked)) == len(every)


@pytest.mark.parametrize("seed", range(10))
def test_no_bound_is_above_what_a_cut_takes(seed: int) -> None:
    budget = needed_bytes(problem(seed, 14, 4, 8)) + (20 if seed % 2 else np.inf)
    asked = replace(problem(seed, 14, 4, 2 + seed), budget_bytes=budget)
    tables = make_tables(asked)
    bounds, cuts = critical(asked, tables, nothing_elsewhere(asked, tables)), all_cuts(asked)
    ends = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, len(asked.positions.at) - 1)))
    least = bounds[np.arange(4), ends[:, :-1], ends[:, 1:]].max(axis=1)
    steps = steps_of(asked, tables, cuts)
    fits = np.isfinite(steps)
    assert fits.any() and (np.isinf(least) == ~fits).all()
    assert (least[fits] <= steps[fits] * (1 + 1e-12)).all()
    assert (least[fits] > 0.7 * steps[fits]).all()  # and it says something


def test_a_bound_that_is_too_high_costs_the_best_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the search trusts its bound."""
    right = [exact(problem(seed, 12, 4, 8)).step_s for seed in range(20)]
    monkeypatch.setattr(searched, "critical", lambda *given: 1.1 * critical(*given))
    monkeypatch.setattr(searched, "_moved", lambda path, last: np.zeros((0, len(path)), dtype=int))
    wrong = [exact(problem(seed, 12, 4, 8)).step_s for seed in range(20)]
    assert wrong != pytest.approx(right) and all(a >= b - 1e-9 for a, b in zip(wrong, right, strict=True))


def test_with_less_to_simulate_the_gap_says_what_may_be_missing() -> None:
    for seed in range(20):
        asked = problem(seed, 16, 5, 5)
        best, quick = exact(asked).step_s, exact(asked, most=3)
        assert quick.bound_s <= best * (1 + 1e-12) and quick.step_s * (1 - quick.gap) <= best * (1 + 1e-12)
    assert any(exact(problem(seed, 16, 5, 5), most=3).gap > 0 for seed in range(20))


def test_nothing_behind_an_always_cut_is_held_with_what_is_before_it() -> None:
    units = tuple(replace(one, cut="always" if at == 2 else "may") for at, one in enumerate(chain(0, 9)))
    asked = PartitionProblem(units, programs(3, 6), StageLink(1.0))
    assert 3 in exact(asked).cuts
    assert exact(asked).step_s == pytest.approx(min(step_of(asked, cuts) for cuts in cuts_of(asked)))


@pytest.mark.parametrize("seed", range(3))
def test_interleaved_runs_are_the_best_of_all(seed: int) -> None:
    asked = replace(problem(seed, 9, 2, 4), programs=programs(2, 4, "interleaved", 2))
    found = exact(asked)
    assert found.step_s == pytest.approx(min(step_of(asked, cuts) for cuts in cuts_of(asked)))
    moved = exact(asked, most=0)
    assert found.step_s <= moved.step_s <= 1.05 * found.step_s and moved.bound_s <= found.step_s


def test_interleaved_runs_under_a_budget_are_refused() -> None:
    asked = replace(problem(0, 9, 2, 4, 1e9), programs=programs(2, 4, "interleaved", 2))
    with pytest.raises(ConfigError, match=r"a budget of 1.0 GB with 2 runs a stage"):
        exact(asked)


def test_a_budget_that_nothing_keeps_says_what_is_needed() -> None:
    units = tuple(unit(states_bytes=2e9) for _ in range(4))
    with pytest.raises(ConfigError, match=r"within 3.00 GB a device: with everything recomputed .* takes 4.00 GB"):
        exact(PartitionProblem(units, programs(2, 2), budget_bytes=3e9))


def test_more_runs_than_places_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 units cannot be cut into 3 runs: they have 1 places to cut"):
        exact(PartitionProblem((unit(), unit()), programs(3, 3)))


def test_choices_that_do_not_fit_are_none() -> None:
    asked = problem(0, 6, 2, 2, 1.0)
    with pytest.raises(ValueError, match="whatever is recomputed"):
        choices_of(asked, (3,))
