"""`python -m experiments.partition_search [--chains 500] [--seed 1]`: the search for cuts beside brute force."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dhp.core.errors import ConfigError
from dhp.planner.partition.bmp import bmp
from dhp.planner.partition.even import by_layers, by_parameters
from dhp.planner.partition.exact import MOST_CUTS, exact
from dhp.planner.partition.problem import PartitionProblem
from dhp.planner.partition.tables import all_cuts, make_tables, steps_of
from experiments.baselines import by_profile
from experiments.partition_search.chains import random_problem

FEWER = 2_000  # cuts that the search simulates, when it is to miss some
Find = Callable[[PartitionProblem], float]  # a method's seconds of a step; inf where its cut does not fit


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.partition_search", description=__doc__)
    parser.add_argument("--chains", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(arguments)
    for row in beside_brute_force(asked.chains, asked.seed):
        print(json.dumps(row | {"command": f"python -m experiments.partition_search --chains {asked.chains} "
                                           f"--seed {asked.seed}"}), flush=True)  # fmt: skip


def fastest(problem: PartitionProblem) -> tuple[float, int]:
    """Brute force: the least seconds of all cuts, each simulated, and how many there are."""
    cuts = all_cuts(problem)
    return float(steps_of(problem, make_tables(problem), cuts).min()), len(cuts)


def at(problem: PartitionProblem, cuts: tuple[int, ...]) -> float:
    """Seconds of one cut."""
    index = np.searchsorted(problem.positions.at, cuts)[None, :]
    return float(steps_of(problem, make_tables(problem), index)[0])


def published(problem: PartitionProblem, by: str) -> float:
    """Of BMP, with recompute under the budget as the search has it."""
    try:
        return bmp(problem, by=by).step_s
    except ConfigError:
        return float("inf")


METHODS: dict[str, Find] = {
    "exact": lambda problem: exact(problem).step_s,
    f"exact, {FEWER:,} simulated": lambda problem: exact(problem, FEWER).step_s,
    "dynamic programming and moves": lambda problem: exact(problem, 0).step_s,
    "bmp by forward": lambda problem: published(problem, "forward"),
    "bmp by work": lambda problem: published(problem, "work"),
    "profile": lambda problem: at(problem, by_profile(problem.units, problem.runs)),
    "layers": lambda problem: at(problem, by_layers(problem.units, problem.runs)),
    "parameters": lambda problem: at(problem, by_parameters(problem.units, problem.runs)),
}


def beside_brute_force(chains: int, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each method: how often it is the fastest, and how far it is from that."""
    rng = np.random.default_rng(seed)
    gaps: dict[str, list[float]] = {name: [] for name in METHODS}
    seconds, counts = dict.fromkeys([*METHODS, "brute force"], 0.0), []
    for _ in range(chains):
        problem = random_problem(rng)
        begin = time.perf_counter()
        best, count = fastest(problem)
        seconds["brute force"] += time.perf_counter() - begin
        counts.append(count)
        for name, find in METHODS.items():
            begin = time.perf_counter()
            gaps[name].append(find(problem) / best - 1)
            seconds[name] += time.perf_counter() - begin
    yield {
        "question": "brute force", "chains": chains, "seed": seed, "seconds": round(seconds["brute force"], 1),
        "most_cuts": max(counts), "above": sum(count > MOST_CUTS for count in counts),
    }  # fmt: skip
    for name in METHODS:
        yield {"question": "chains", "method": name, **_figures(np.array(gaps[name])), "chains": chains, "seed": seed,
               "seconds": round(seconds[name], 1)}  # fmt: skip


def _figures(gaps: np.ndarray) -> dict[str, Any]:
    fits = np.isfinite(gaps)
    return {
        "equal": int((gaps < 1e-9).sum()),
        "fits": int(fits.sum()),
        "mean_gap": round(float(gaps[fits].mean()), 6),
        "worst_gap": round(float(gaps[fits].max()), 6),
    }


if __name__ == "__main__":
    main()
