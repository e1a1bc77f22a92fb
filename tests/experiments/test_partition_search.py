"""The search beside brute force, as the experiment writes it down."""

from __future__ import annotations

import numpy as np

from dhp.planner.partition.exact import exact
from experiments.partition_search.__main__ import METHODS, beside_brute_force, fastest
from experiments.partition_search.chains import random_problem


def test_the_search_is_as_fast_as_brute_force_and_no_rule_is_faster() -> None:
    brute, *found = beside_brute_force(chains=8, seed=5)
    assert brute["most_cuts"] > 1000
    by_method = {row["method"]: row for row in found}
    assert list(by_method) == list(METHODS)
    assert by_method["exact"]["equal"] == by_method["exact"]["fits"] == 8 and by_method["exact"]["worst_gap"] < 1e-9
    assert all(row["mean_gap"] > -1e-9 for row in found)
    assert by_method["parameters"]["worst_gap"] > 0.05  # a rule that is seen to be worse


def test_chains_are_what_they_are_said_to_be() -> None:
    rng = np.random.default_rng(0)
    problems = [random_problem(rng) for _ in range(60)]
    assert {len(one.units) for one in problems} <= set(range(13, 31))
    assert {one.stages for one in problems} == set(range(3, 9))
    budgets = [one for one in problems if np.isfinite(one.budget_bytes)]
    assert 15 < len(budgets) < 45
    assert sum(any(choice != "none" for choice in exact(one).recompute) for one in budgets) > len(budgets) / 2
    frozen = {tuple(dict.fromkeys((u.part, u.trains) for u in one.units)) for one in problems}
    assert len(frozen) == 3


def test_brute_force_tries_more_than_the_search_does() -> None:
    problem = random_problem(np.random.default_rng(1))
    assert exact(problem).tried < fastest(problem)[1]
