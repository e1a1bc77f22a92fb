"""Two parts in one chain: the run that holds where one ends and the other begins, against every cut."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dhp.config.ranges import ONE_F_ONE_B
from dhp.core.errors import ConfigError
from dhp.plan.cut.bmp import bmp, by_layers, by_parameters
from dhp.plan.cut.exact import critical, exact, nothing_elsewhere
from dhp.plan.cut.problem import PartitionProblem, bounds_of
from dhp.plan.cut.run_tables import all_cuts, make_tables, needed_bytes, steps_of
from dhp.plan.cut.simulate import chain_graph, chain_programs, pipeline_programs
from dhp.plan.cut.units import PinnedUnit, Saved, Unit
from dhp.step.schedule import make_schedule, outstanding
from experiments.baselines import by_profile
from tests.plan.cut.made import cuts_of, problem
from tests.plan.cut.test_exact import step_of

UNITS, BORDER = 12, 4  # of them, those of the tower


def joined(seed: int, tower: int, stages: int, units: int = UNITS) -> PartitionProblem:
    """A chain of `tower` and `stages` stages, of which two are one; nothing is cut at the border."""
    own = problem(seed, units, tower + stages - 1, (tower + stages - 1) * (1 + seed % 2))
    border = units // 3
    merged = tuple(replace(one, cut="never" if at == border - 1 else "may") for at, one in enumerate(own.units))
    return replace(own, units=merged, held=PinnedUnit(border - 1, tower - 1))


def admitted(asked: PartitionProblem, border: int = BORDER) -> list[tuple[int, ...]]:
    """Cuts by the rule in words: both parts have a unit in the run, and as many runs are before as are asked for."""
    assert asked.held is not None
    found = []
    for cuts in cuts_of(asked):
        first, end = bounds_of(asked, cuts)[asked.held.run]
        if first < border < end:
            found.append(cuts)
    return found


@pytest.mark.parametrize(("tower", "stages"), [(1, 3), (2, 2), (2, 3), (3, 1), (3, 3), (4, 2)])
@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_best_of_all_cuts_that_are_admitted(seed: int, tower: int, stages: int) -> None:
    asked = joined(seed, tower, stages)
    every = {cuts: step_of(asked, cuts) for cuts in admitted(asked)}
    found = exact(asked)
    assert found.step_s == pytest.approx(min(every.values()), rel=1e-12)
    assert every[found.cuts] == pytest.approx(found.step_s, rel=1e-12) and found.gap == 0
    finite = np.isfinite(steps_of(asked, make_tables(asked), all_cuts(asked)))
    assert finite.sum() == len(every)


@pytest.mark.parametrize("seed", range(6))
def test_with_few_simulated_the_bound_holds(seed: int) -> None:
    asked = joined(seed, 3, 3)
    best = min(step_of(asked, cuts) for cuts in admitted(asked))
    found = exact(asked, most=3)
    assert found.bound_s <= best * (1 + 1e-12) and found.step_s >= best * (1 - 1e-12)
    tables = make_tables(asked)
    bounds = critical(asked, tables, nothing_elsewhere(asked, tables))
    for cuts in admitted(asked):
        ends = [int(np.searchsorted(asked.positions.at, end)) for end in (0, *cuts, UNITS)]
        assert max(bounds[k, a, b] for k, (a, b) in enumerate(zip(ends, ends[1:]))) <= step_of(asked, cuts) * (
            1 + 1e-12
        )


@pytest.mark.parametrize("seed", range(6))
def test_under_a_budget_both_are_kept(seed: int) -> None:
    free = joined(seed, 2, 3)
    asked = replace(free, budget_bytes=round(needed_bytes(free) + 9))
    found = exact(asked)
    first, end = bounds_of(asked, found.cuts)[1]
    assert first < BORDER < end and set(found.recompute) - {"none"}
    assert found.gap == 0 and found.step_s > exact(free).step_s - 1e-12


@pytest.mark.parametrize("method", [by_parameters, by_layers, by_profile])
@pytest.mark.parametrize("seed", range(4))
def test_even_cuts_are_even_among_those_admitted(seed: int, method: Any) -> None:
    asked = joined(seed, 2, 3)
    of = {by_parameters: "parameters", by_layers: "layers", by_profile: "forward_s"}[method]

    def cost(cuts: tuple[int, ...]) -> float:
        runs = [sum(getattr(unit, of) for unit in asked.units[a:b]) for a, b in bounds_of(asked, cuts)]
        return max(runs) if method is by_parameters else float(np.var(runs))

    found = method(asked.units, asked.runs, asked.held)
    assert found in admitted(asked)
    assert cost(found) == pytest.approx(min(map(cost, admitted(asked))))


@pytest.mark.parametrize(("tower", "stages"), [(1, 4), (2, 3), (3, 2), (4, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_balanced_cuts_are_admitted(seed: int, tower: int, stages: int) -> None:
    asked = joined(seed, tower, stages)
    assert bmp(asked).cuts in admitted(asked)


def test_the_anchor_moves_as_far_as_it_must() -> None:
    """A tower that takes next to no time has its stages all the same."""
    asked = joined(0, 3, 3)
    light = tuple(
        replace(one, forward_s=1e-6, backward_s=2e-6) if at < BORDER else one for at, one in enumerate(asked.units)
    )
    assert bmp(replace(asked, units=light)).cuts in admitted(asked)


def test_too_few_units_are_said() -> None:
    with pytest.raises(ConfigError, match="of which run 4 has 3: there are too few units before it or behind it"):
        exact(joined(0, 5, 2))
    with pytest.raises(ConfigError, match="a part has fewer layers than stages"):
        by_layers(joined(0, 5, 2).units, 6, PinnedUnit(3, 4))


def test_what_the_first_part_keeps_counts_for_a_micro_batch_more() -> None:
    # Two actors share the device of the tower's last stage, and the tower's works on the next micro-batch already.
    graph = chain_graph(2, 2)
    most = outstanding(make_schedule(ONE_F_ONE_B, graph, 8), graph)
    assert [most[stage.name][stage.name] for stage in graph.stages] == [4, 3, 2, 1]
    programs = chain_programs(ONE_F_ONE_B, 2, 2, 8)
    tower, decoder = unit_that_keeps(10.0, "vision"), unit_that_keeps(100.0, "text")
    units = (tower, replace(tower, cut="never"), decoder, decoder)
    asked = PartitionProblem(units, programs, held=PinnedUnit(1, 1), budget_bytes=230.0)
    assert asked.in_flight == (4, 2, 1)
    assert [unit.saved["none"].held_bytes for unit in asked.units_of(1)] == [15.0, 15.0, 100.0, 100.0]
    assert asked.units_of(0) is asked.units
    assert needed_bytes(asked) == 2 * 100.0 + 3 * 10.0
    assert exact(asked).cuts == (1, 3)
    with pytest.raises(ConfigError, match="0.00 GB"):
        exact(replace(asked, budget_bytes=229.0))


def unit_that_keeps(held_bytes: float, part: str) -> Unit:
    return Unit("layer", part, 1, 1.0, 2.0, saved={"none": Saved(held_bytes)})


@pytest.mark.parametrize("seed", range(4))
def test_of_cuts_as_fast_the_most_even(seed: int) -> None:
    # One stage takes all the time; the others' layers may lie anywhere.
    layers = tuple(Unit(f"{at}", "text", 1, 0.01, 0.02) for at in range(8 + seed))
    slow = Unit("slow", "text", 1, 10.0, 20.0)
    units = (*layers, slow) if seed % 2 else (slow, *layers)
    asked = PartitionProblem(units, pipeline_programs(ONE_F_ONE_B, 4, 1, 8))
    smallest, *others = sorted(end - first for first, end in bounds_of(asked, exact(asked).cuts))
    assert smallest == 1 and max(others) - min(others) <= 1
