"""OmniBal's four rows on one model, one after another, by replay: nothing, balanced packs, a balanced cut, and as much
recompute as the memory asks for.

All rows train the same samples, of many lengths, in one step of several replicas of a chain. The first pads random
batches and is cut by parameters; all but the last recompute every layer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dhp.batch.encoder_shards import Split
from dhp.batch.reader import BatchReader
from dhp.core.batch import Batch
from dhp.data.balance.methods import random_batches
from dhp.data.balance.packs import Limits, Loads, Packs
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.models.registry import load_family
from dhp.planner.partition.even import by_parameters
from dhp.planner.partition.exact import exact
from dhp.planner.partition.problem import Partition, PartitionProblem
from dhp.planner.partition.tables import needed_bytes
from dhp.planner.units import NONE, Saved, Unit
from dhp.trainer.programs import pipeline_programs
from experiments.baselines import balanced_stages
from experiments.pair import TEXT, VISION, as_batch, join_alone
from experiments.partition.chain import SCHEDULE, Chain, Stages, by_stage, plan_chain, stages_of
from experiments.partition.replay import SHAPE, Shape, keep_freed_memory
from experiments.recompute.work import make_model, make_sample

SIDES, SHARES = (8, 12, 16), (0.5, 0.3, 0.2)  # of pictures, in patches
WORDS, SPREAD, MOST_WORDS = 12, 0.8, 96  # the words' logarithm has this deviation
TOGETHER = 2  # samples of a random batch
STAGES, REPLICAS = 4, 4
SLACK = (
    1.0,
    1.05,
    1.1,
    1.15,
    1.2,
    1.3,
    1.4,
    1.6,
    2.0,
)  # the least is taken with no more packs than random batches have
TIGHTER = (1.0, 0.85, 0.7, 0.55)  # shares of the budget that the search is given until the step keeps within it
FULL, ACCOUNTED = "full", "memory.accounting=true"


@dataclass(frozen=True)
class Way:
    """A row: how its samples come, where the model is cut, and what it recomputes, by part as the keys have it."""

    name: str
    batch: Batch
    stages: Stages
    recompute: Mapping[str, str]
    padded: bool = False

    @property
    def micro_batches(self) -> int:
        return len(self.batch.work[TEXT])

    def start(self, model: str, *more: str) -> Chain:
        """All of its ranks."""
        given = [f"{part}.recompute='{choice}'" for part, choice in self.recompute.items()]
        given.append(f"data.packing={str(not self.padded).lower()}")
        return Chain(plan_chain(model, self.stages, self.micro_batches, "", *given, *more), self.micro_batches)


def components(rounds: int, shape: Shape = SHAPE, samples: int = 64, seed: int = 1) -> Iterator[dict[str, Any]]:
    """A row for each of the four."""
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder, join_alone():
        model = make_model(Path(folder), shape.tower, shape.decoder, shape.decoder_layers, shape.tower_layers)
        ways, budget = four_ways(model, shape, draw_samples(samples, seed), seed)
        peaks = {way.name: peak_of(model, way) for way in ways}
        times = in_turn(model, ways, rounds)
    for way in ways:
        took = times[way.name]
        yield {
            "question": "components", "row": way.name, "samples": samples, "micro_batches": way.micro_batches,
            "stages": STAGES, "replicas": REPLICAS, "step_s": round(median(took), 4),
            "speedup": round(median(a / b for a, b in zip(times[ways[0].name], took, strict=True)), 3),
            "peak_mib": round(peaks[way.name] / 2**20, 1), "budget_mib": round(budget / 2**20, 1),
            "recompute": dict(way.recompute), "rounds": rounds,
        }  # fmt: skip


def draw_samples(count: int, seed: int) -> list[Sample]:
    """Samples of many lengths, each with one picture."""
    rng = np.random.default_rng(seed)
    words = np.exp(rng.normal(np.log(WORDS), SPREAD, count)).astype(int).clip(4, MOST_WORDS)
    return [make_sample(int(side), int(n), at) for at, (side, n) in enumerate(zip(rng.choice(SIDES, count, p=SHARES),
                                                                                 words, strict=True))]  # fmt: skip


def four_ways(model: str, shape: Shape, samples: Sequence[Sample], seed: int) -> tuple[list[Way], float]:
    """The rows, and the bytes of activations that a device has room for: half of the way from what the cut of the third
    row takes with everything recomputed to what it takes with nothing."""
    loads = Loads(np.array([len(s.pixels[0]) for s in samples]), np.array([len(s.input_ids) for s in samples]))
    count = len(samples) // TOGETHER
    padded = deal_packs(model, samples, random_batches(loads, _room(loads, count), REPLICAS, seed), packing=False)
    rooms = (replace(_room(loads, count, slack), soft=True) for slack in SLACK)
    as_many = (packs for room in rooms if len(packs := balanced_stages(loads, room, REPLICAS, seed)) <= count)
    packed = deal_packs(model, samples, next(as_many), packing=True)
    units = measured(model, shape, packed)
    everything = tuple(
        replace(u, saved={NONE: u.saved["all"]}, backward_s=u.backward_s + u.saved["all"].replay_s) for u in units
    )
    programs = pipeline_programs(SCHEDULE, STAGES, 1, len(packed.work[TEXT]) // REPLICAS)
    by_size = stages_of(units, by_parameters(units, STAGES))
    full = {VISION: FULL, TEXT: FULL}
    ways = [Way("nothing", padded, by_size, full, True), Way("+ data", packed, by_size, full)]
    ways.append(Way("+ model", packed, stages_of(units, exact(PartitionProblem(everything, programs)).cuts), full))
    none = replace(ways[-1], recompute={VISION: "none", TEXT: "none"})
    budget = (peak_of(model, ways[-1]) + peak_of(model, none)) / 2
    ways.append(_within(model, PartitionProblem(units, programs), packed, budget))
    return ways, budget


def _room(loads: Loads, count: int, slack: float = 1.0) -> Limits:
    """What each of `count` packs may hold: its share, and some more."""
    vision, text = (int(slack * own.sum() / count) + 1 for own in (loads.vision, loads.text))
    return Limits(vision, text, TOGETHER)


def _within(model: str, problem: PartitionProblem, batch: Batch, budget: float) -> Way:
    """Cut and recompute for the budget. The search is given less of it until the step keeps within it."""
    for share in TIGHTER:
        given = replace(problem, budget_bytes=max(share * budget, needed_bytes(problem)))
        found = exact(given)
        way = Way("+ memory", batch, stages_of(problem.units, found.cuts), recompute_of(problem.units, found))
        if peak_of(model, way) <= budget:
            break
    return way


def recompute_of(units: Sequence[Unit], found: Partition) -> dict[str, str]:
    """What layers recompute, as `vision.recompute` and `text.recompute` have it."""
    choices = {
        part: [c for u, c in zip(units, found.recompute, strict=True) if u.part == part] for part in (VISION, TEXT)
    }
    again = {part: [str(at) for at, choice in enumerate(own) if choice != NONE] for part, own in choices.items()}
    return {part: f"all:{','.join(layers)}" if layers else "none" for part, layers in again.items()}


def measured(model: str, shape: Shape, batch: Batch) -> tuple[Unit, ...]:
    """A unit for each layer: seconds of the medians, and what it keeps of the largest micro-batch, with and without
    recomputing."""
    counts = (shape.tower_layers, shape.decoder_layers)
    each = Stages(*counts, *(tuple(range(1, count)) for count in counts), shared=False)
    way = Way("each layer", batch, each, {VISION: "none", TEXT: "none"})
    kept, again = (_taken(model, one) for one in (way, replace(way, recompute={VISION: FULL, TEXT: FULL})))
    plain = way.start(model)
    units = []
    for spec in plain.graph.stages:
        (seconds, held), (longer, recomputed) = kept, again
        forward, back = seconds[spec.name, False], seconds[spec.name, True]
        replay = Saved(*recomputed[spec.name], max(0.0, longer[spec.name, True] - back))
        units.append(Unit(spec.name, spec.part, 1, forward, back, plain.parameters[spec.name],
                          saved={NONE: Saved(held[spec.name][0]), "all": replay}))  # fmt: skip
    return tuple(units)


def _taken(model: str, way: Way) -> tuple[dict[tuple[str, bool], float], dict[str, tuple[int, int]]]:
    """Median seconds of each stage's passes, and the bytes that it holds of a micro-batch and adds in a replay."""
    accounted = way.start(model, ACCOUNTED)
    accounted.step(way.batch)
    usages = {name: usage for name, usage in accounted.usages.items() if usage is not None}
    held = {}
    for name, usage in usages.items():
        kept = usage.before_bytes + usage.after_bytes + sum(layer.held_bytes for layer in usage.layers)
        held[name] = (kept, max(layer.replay_bytes for layer in usage.layers))
    chain = way.start(model)
    chain.step(way.batch)
    return {key: median(values) for key, values in by_stage(chain.step(way.batch)[0]).items()}, held


def peak_of(model: str, way: Way) -> int:
    """Bytes of activations on the fullest device."""
    chain = way.start(model, ACCOUNTED)
    chain.step(way.batch)
    return chain.peak_bytes()


def in_turn(model: str, ways: Sequence[Way], rounds: int) -> dict[str, list[float]]:
    """Replayed seconds of a step of each, round after round."""
    chains = {way.name: way.start(model) for way in ways}
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for at in range(rounds + 1):
        for way in ways:
            took = chains[way.name].replay(chains[way.name].step(way.batch)[0], REPLICAS)
            times[way.name] += [took] if at else []
    return times


def deal_packs(model: str, samples: Sequence[Sample], packs: Packs, packing: bool) -> Batch:
    """A step whose micro-batches are these packs."""
    dealt = tuple((tuple(samples[at] for at in packs.pack(number)),) for number in range(len(packs)))
    source: Any = SimpleNamespace(step=lambda k: StepSamples(k, 0, dealt, ()))
    reader = BatchReader(source, load_family(model), 0, {VISION: Split(1, 1, stages=2)}, packing)
    return as_batch(reader.step(0))
