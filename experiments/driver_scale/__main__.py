"""`python -m experiments.driver_scale --ranks 8 16 32 64`: what a step costs the driver and Ray, by ranks and routes.

Groups of empty actors, four micro-batches, text in replicas of eight tensor ranks; the product's own step, schedule and
routes. JSON lines: {ranks, routes, calls, refs, submit_s, step_s, floor_s}, medians of interleaved rounds; floor_s: of
as many calls without arguments or results."""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from dhp.batch.assign_images import assign_longest_first, assign_near
from dhp.cluster.cluster import ActorGroup
from dhp.cluster.hangs.watch import wait_all
from dhp.cluster.ray_session import OWN_SYSTEM
from dhp.core.axes import Degrees
from dhp.core.batch import Batch
from dhp.core.dispatch import Call, per_rank, spread
from dhp.core.graph import Edge, Route, StageGraph, StageSpec, dense
from dhp.plan.run_plan import devices_as_planned, find_localities
from dhp.step.schedule import make_schedule
from dhp.step.stages import make_stages
from dhp.step.step import train_step
from experiments.driver_scale.actor import Empty

MICRO_BATCHES, TENSOR = 4, 8
IMAGES = 4  # of a text rank and micro-batch, sizes log-normal as in conversations about photographs
SLACK = 0.01  # the product's default
PROCESSES = 64  # of each part, at most
TIMEOUT_S = 300.0
ONE_PASS = "sparse, one pass"  # of vision, over all micro-batches of the step


class EmptyGroup(ActorGroup):
    """A group of empty actors, which counts what passes the driver."""

    calls = refs = 0
    apart = False  # a call for each verb

    def _create(self, slot: Any, rank: int, reserved: Any) -> Any:
        """Of many ranks several share an actor: as many calls, each by itself, from fewer processes."""
        actors = self.__dict__.setdefault("actors", [])
        if rank % -(-self.size // PROCESSES) == 0:
            actors.append(ray.remote(Empty).options(num_cpus=0, max_restarts=0).remote())
        return actors[-1]

    def execute_in_turn_async(self, *calls: Call) -> list[list[Any]]:
        if self.apart and len(calls) > 1:
            of_calls = [self.execute_in_turn_async(call) for call in calls]
            return [[ref for refs in of_rank for ref in refs] for of_rank in zip(*of_calls)]
        of_calls = [spread((call.returns,), self.size) for call in calls]
        counts = [sum(count for (count,) in of_rank) for of_rank in zip(*of_calls)]
        given = [value for call in calls for of_rank in spread(call.arguments, self.size) for value in of_rank]
        self.calls += self.size
        self.refs += sum(isinstance(value, ray.ObjectRef) for value in given) + sum(counts)
        first = replace(calls[0], arguments=(per_rank(counts), *calls[0].arguments))
        return super().execute_in_turn_async(first, *calls[1:])


def make_graph(ranks: int, batch: int = 1) -> StageGraph:
    """So many ranks of vision, each with images of its own, and of text, on the same devices. batch: micro-batches of a
    pass of vision."""
    tower, split = Degrees(data=ranks), Degrees(data=ranks // TENSOR, tensor=TENSOR)
    vision = StageSpec("vision", "vision", (range(1),), tower, True, range(ranks))
    text = StageSpec("text", "text", (range(1),), split, True, range(ranks))
    return StageGraph((vision, text), (Edge(vision.nodes[0], text.nodes[0], ("embeddings",), True, batch),))


def sparse(graph: StageGraph, rng: np.random.Generator) -> Route:
    """Where images of random sizes go."""
    ranks, replicas = graph.stages[0].degrees.shards, graph.stages[1].degrees.shards
    costs = rng.lognormal(6.5, 0.6, IMAGES * ranks).tolist()
    owners = rng.integers(0, replicas, len(costs)).tolist()
    locality = find_localities(graph, devices_as_planned(graph), SLACK)["vision"]
    found = assign_near(costs, owners, assign_longest_first(costs, ranks), locality)
    return Route(tuple(sorted({(v, owners[i]) for v, own in enumerate(found) for i in own})))


def measure(ranks: int, rounds: int) -> Iterator[dict[str, Any]]:
    """A line for each kind of route, in interleaved rounds after one that does not count."""
    graph, rng = make_graph(ranks), np.random.default_rng(0)
    settings = (SimpleNamespace(stage=stage.name, size=ranks, log_dir=None) for stage in graph.stages)
    groups = {s.stage: EmptyGroup(s, [None] * ranks, None) for s in settings}
    everyone, needed = (lambda: dense(ranks, ranks // TENSOR)), (lambda: sparse(graph, rng))
    routes = {"dense, apart": everyone, "dense": everyone, "sparse": needed, ONE_PASS: needed}
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in routes}
    for _ in range(rounds + 1):
        for kind, make in routes.items():
            for group in groups.values():
                group.apart = kind == "dense, apart"
            of_kind = make_graph(ranks, MICRO_BATCHES if kind == ONE_PASS else 1)
            schedule = make_schedule("sequential", of_kind, MICRO_BATCHES)
            batch = Batch(ray.put("info"), _work(of_kind), {"vision": [make() for _ in range(MICRO_BATCHES)]})
            found[kind].append(_step(make_stages(of_kind, groups), groups, schedule, batch))
    for group in groups.values():
        group.stop()
    for kind, of_kind in found.items():
        kept = of_kind[1:]
        yield {"ranks": ranks, "routes": kind} | {
            key: round(median(one[key] for one in kept), 4)
            for key in ("calls", "refs", "submit_s", "step_s", "floor_s")
        }


def _work(graph: StageGraph) -> dict[str, list[list[Any]]]:
    return {
        stage.part: [
            [ray.put(shard) for shard in range(stage.degrees.shards)]
            for _ in range(MICRO_BATCHES // graph.batch_of(stage.part))
        ]
        for stage in graph.stages
    }


def _step(stages: Any, groups: dict[str, EmptyGroup], schedule: Any, batch: Batch) -> dict[str, float]:
    for group in groups.values():
        group.calls = group.refs = 0
    begin = time.perf_counter()
    train_step(stages, schedule, (), batch)
    submitted = time.perf_counter()
    wait_all([entry for group in groups.values() for entry in group.take_watched()], TIMEOUT_S)
    end = time.perf_counter()
    found = {
        "calls": sum(group.calls for group in groups.values()), "refs": sum(group.refs for group in groups.values()),
        "submit_s": submitted - begin, "step_s": end - begin,
    }  # fmt: skip
    begin = time.perf_counter()
    for group in groups.values():
        for _ in range(group.calls // group.size):
            group.execute_all_async("nothing", returns=0)
    wait_all([entry for group in groups.values() for entry in group.take_watched()], TIMEOUT_S)
    return {**found, "floor_s": time.perf_counter() - begin}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.driver_scale", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64], help="of each part; multiples of 8")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray would warn of what it does without it
    answers = sys.stdout
    with redirect_stdout(sys.stderr):  # Ray's warnings of many processes
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(address="local", num_cpus=4, include_dashboard=False, _system_config=OWN_SYSTEM, **quiet)
        for ranks in given.ranks:
            for line in measure(ranks, given.rounds):
                print(json.dumps(line), file=answers, flush=True)


if __name__ == "__main__":
    main()
