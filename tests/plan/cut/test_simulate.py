"""Many cuts at once take what the timed clock says of each."""

from dataclasses import replace

import numpy as np
import pytest

from dhp.core.axes import Degrees
from dhp.core.graph import HIDDEN_STATES, Edge, Node, StageGraph, StageSpec
from dhp.plan.cut.simulate import Costs, in_flight, merged, simulate
from dhp.step.schedule import Action, Backward, make_programs
from dhp.step.timed import play
from tests.plan.cut.made import programs

# Schedule, stages, chunks of each, micro-batches, and how many of the first stages do not train.
CASES = [
    ("1f1b", 1, 1, 3, 0),
    ("1f1b", 3, 1, 2, 0),
    ("1f1b", 4, 1, 9, 0),
    ("1f1b", 4, 1, 9, 1),
    ("1f1b", 4, 1, 3, 3),
    ("gpipe", 3, 1, 5, 0),
    ("gpipe", 3, 1, 5, 2),
    ("interleaved", 2, 2, 6, 0),
    ("interleaved", 3, 3, 6, 0),
]


def graph_of(stages: int, chunks: int, frozen: int) -> StageGraph:
    """A pipeline whose first `frozen` stages do not train."""
    specs = tuple(
        StageSpec(f"text.{at}", "text", (range(1),) * chunks, Degrees(), at >= frozen, range(at, at + 1))
        for at in range(stages)
    )
    nodes = [Node(spec.name, chunk) for chunk in range(chunks) for spec in specs]
    edges = [Edge(a, b, (HIDDEN_STATES,), at >= frozen) for at, (a, b) in enumerate(zip(nodes, nodes[1:]))]
    return StageGraph(specs, tuple(edges))


@pytest.mark.parametrize(("kind", "stages", "chunks", "micro_batches", "frozen"), CASES)
def test_it_is_the_timed_clock(kind: str, stages: int, chunks: int, micro_batches: int, frozen: int) -> None:
    rng, runs, cuts = np.random.default_rng(stages), stages * chunks, 5
    forward, backward = rng.uniform(0.1, 2.0, (runs, cuts)), rng.uniform(0.1, 3.0, (runs, cuts))
    hop = rng.uniform(0.0, 1.0, (runs - 1, cuts))
    back = np.broadcast_to(np.arange(runs)[:, None] >= frozen, (runs, cuts))
    order = merged(programs(stages, micro_batches, kind, chunks))
    found = simulate(order, stages, Costs(forward, backward, hop, back))
    graph = graph_of(stages, chunks, frozen)
    at = {node: run for run, node in enumerate(graph.nodes())}
    for cut in range(cuts):

        def seconds(action: Action, cut: int = cut) -> float:
            return float((backward if isinstance(action, Backward) else forward)[at[action.node], cut])

        def way(edge: Edge, back: bool, cut: int = cut) -> float:
            return float(hop[at[edge.source], cut])

        alone = play(make_programs(kind, graph, micro_batches), graph, seconds, way).step_s
        assert found[cut] == pytest.approx(alone, rel=1e-12)


def test_more_cuts_than_fit_at_once_come_in_their_order() -> None:
    order, count = merged(programs(2, 3)), 5000
    forward = np.stack([np.linspace(1, 2, count)] * 2)
    costs = Costs(forward, 2 * forward, np.zeros((1, count)), np.ones((2, count), dtype=bool))
    found = simulate(order, 2, costs)
    assert found.shape == (count,) and (np.diff(found) > 0).all()
    assert found[0] == 12.0  # (3 + 2 - 1) micro-batches of 1 + 2 seconds


def test_a_run_that_is_frozen_waits_for_nothing() -> None:
    order, ones = merged(programs(2, 4)), np.ones((2, 1))
    costs = Costs(ones, 2 * ones, np.zeros((1, 1)), np.array([[False], [True]]))
    assert simulate(order, 2, costs)[0] == 1 + 4 * 3
    assert simulate(order, 2, replace(costs, back=np.ones((2, 1), dtype=bool)))[0] == 15


def test_programs_that_wait_for_one_another_are_named() -> None:
    one = programs(2, 2)
    with pytest.raises(ValueError, match="wait for one another.*run=0, back=True, micro_batch=1"):
        merged((one[0][::-1], one[1]))


@pytest.mark.parametrize(("kind", "held"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [8] * 4), ("sequential", [1] * 4)])
def test_micro_batches_in_flight(kind: str, held: list[int]) -> None:
    assert [in_flight(program) for program in programs(4, 8, kind)] == held
