"""`python -m experiments.text_ratio [--rounds 5] [--layouts 1+1 …] [--pictures 1 4 16] [--shares .1 .3 .5]
[--replay]`: a step of the whole model beside one of its decoder alone, on text rows of the same lengths, by the same
actors."""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
import torch

from dhp.batch.encoder_shards import Split
from dhp.batch.reader import BatchReader
from dhp.batch.shard import Division
from dhp.cluster.forks.start_server import fork_server
from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, StepData
from dhp.core.graph import StageGraph
from dhp.data.sample.sample import Sample
from dhp.data.sampling.sampler import BatchLayout
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.stage_settings import OptimizerSettings
from dhp.engine.text_engine import TextEngine
from dhp.models.registry import load_family
from dhp.step.schedule import Schedule, make_schedule
from dhp.step.stages import make_stages
from dhp.step.step import train_step
from experiments.commands import command_of
from experiments.pair import ONE, TEXT, VISION, TimedHere, as_batch, join_alone, keep_freed_memory, pair_of, settings_of
from experiments.small import IMAGE, PATCH_VALUES, WORD_IDS, dealer, save_even_model, started, timed
from experiments.text_ratio.took import Took, lost, replayed, reported

MICRO_BATCHES, WORDS, FEATURES = 8, 128, 256  # of a step; of a row: tokens of text, and those of its pictures
LAYOUTS = {
    "1+1": (ONE, ONE), "2+2": (Degrees(data=2), Degrees(data=2)),
    "2+2 SP+TP": (Degrees(ulysses=2), Degrees(tensor=2)),
    "4+4": (Degrees(data=4), Degrees(data=4)), "8+8": (Degrees(data=8), Degrees(data=8)),
}  # fmt: skip
CUT = ("2+2 SP+TP",)  # rows over ranks: no replay
ALONE = "decoder alone"
Row = dict[str, Any]
WAYS = {
    "sequential": ("sequential", 1),
    "vision_ahead": ("vision_ahead", 1),
    "whole step": ("vision_ahead", MICRO_BATCHES),
}
UPDATE = OptimizerSettings(1e-4, (0.9, 0.999), 1e-8, 0.0, "constant", 0, 10**6, None)
KINDS = {"even": (True, False), "uneven": (False, False), "small": (False, True)}  # of `Rows`
ENGINES = {VISION: EncoderEngine, TEXT: TextEngine}
SMALL = (2, 4, 6, 8)  # patches of a small picture's side
TEXT_ONLY = 4  # of uneven rows, each so many-th has no picture
DECODER, LAYERS = 256, 8
STEPS = 2  # that a round submits
MODULES = ("dhp.engine.engines", "dhp.batch.reader")  # that actors find imported, as those of a run


@dataclass(frozen=True)
class Rows:
    """Of a step. pictures: of a row that has any. even: all alike; else their sides differ, and some rows have none.
    small: sides of 28 to 112 pixels, in all rows."""

    pictures: int
    even: bool
    small: bool = False

    def samples(self, count: int) -> list[Sample]:
        """So many, each of FEATURES tokens of pictures in the mean."""
        rng = np.random.default_rng(0)
        mean = np.sqrt(4 * FEATURES / self.pictures)  # patches along a side
        spread = 0.0 if self.even else 0.4
        found = []
        for number in range(count):
            drawn = rng.lognormal(np.log(mean) - spread**2, spread, self.pictures)
            sides = [max(2, 2 * round(float(side) / 2)) for side in drawn]
            if self.small:
                sides = rng.choice(SMALL, self.pictures).tolist()
            alone = not (self.even or self.small) and number % TEXT_ONLY == TEXT_ONLY - 1
            found.append(_sample(number, [] if alone else sides))
        return found


def _sample(seed: int, sides: Sequence[int]) -> Sample:
    """Square pictures of so many patches a side, each behind a word, and text of which half is learned."""
    rng = np.random.default_rng(seed)
    ids = [token for side in sides for token in (5, *[IMAGE] * (side * side // 4))]
    ids += rng.integers(3, WORD_IDS, WORDS).tolist()
    labels = [IGNORED] * (len(ids) - WORDS // 2) + ids[-WORDS // 2 :]
    pixels = tuple(rng.standard_normal((side * side, PATCH_VALUES), dtype=np.float32) for side in sides)
    whole = np.array(ids)
    kinds = (whole == IMAGE).astype(np.int64)
    return Sample("made", seed, whole, np.array(labels), kinds, pixels, tuple((1, side, side) for side in sides))


def as_text(sample: Sample) -> Sample:
    """A row of as many tokens, without pictures."""
    ids = np.where(sample.input_ids == IMAGE, 7, sample.input_ids)
    return replace(sample, input_ids=ids, mm_token_type_ids=np.zeros_like(ids), pixels=(), grids=())


def deal(model: str, degrees: tuple[Degrees, Degrees], samples: Sequence[Sample], batch: int) -> StepData:
    """A step's samples, a row each. batch: micro-batches whose pictures the tower takes at a time."""
    vision, text = degrees
    layout = BatchLayout(text.data, MICRO_BATCHES, 1)
    division = Division({VISION: Split(vision.data, vision.sequence)}, packing=True, text=text, batch=batch)
    return dealer(lambda source: BatchReader(source, load_family(model), 0, division), samples, layout)


def model_of(folder: Path, share: float, samples: Sequence[Sample], degrees: tuple[Degrees, Degrees]) -> str:
    """The model whose tower has nearest to that share of the operations."""
    widths = range(32, 513, 32)
    made = {width: save_even_model(folder, width, DECODER, LAYERS) for width in widths}
    off = {width: abs(_share(deal(model, degrees, samples, 1)) - share) for width, model in made.items()}
    return made[min(off, key=lambda width: off[width])]


def _share(data: StepData) -> float:
    return data.info.flops[VISION] / sum(data.info.flops.values())


@dataclass(frozen=True)
class Case:
    """Steps of the same samples. steps: by way, passes of the tower, order of all passes, and what ranks take.
    tower_work: the tower's operations for one of the decoder's."""

    graph: StageGraph
    model: str
    steps: Mapping[str, tuple[StageGraph, Schedule, StepData]]
    tower_work: float


def make_case(folder: Path, degrees: tuple[Degrees, Degrees], share: float, rows: Rows) -> Case:
    """Each way, and the decoder alone."""
    samples = rows.samples(MICRO_BATCHES * degrees[1].data)
    model = model_of(folder, share, samples, degrees)
    work = deal(model, degrees, samples, 1).info.flops
    graph = pair_of(load_family(model), *degrees)
    text = deal(model, degrees, list(map(as_text, samples)), 1)
    steps = {}
    for way, (schedule, batch) in {ALONE: ("sequential", 1), **WAYS}.items():
        passes = of_passes(graph, batch)
        data = text if way == ALONE else deal(model, degrees, samples, batch)
        steps[way] = (passes, make_schedule(schedule, passes, MICRO_BATCHES), data)
    return Case(graph, model, steps, work[VISION] / work[TEXT])


def of_case(name: str, share: float, rows: Rows, rounds: int, replay: bool) -> Iterator[Row]:
    """A row for each way to order the tower's passes. Rounds are interleaved; of each the second step counts."""
    degrees = LAYOUTS[name]
    with tempfile.TemporaryDirectory() as folder:
        case = make_case(Path(folder), degrees, share, rows)
        steps, calls = replay_steps(case, rounds) if replay else run_steps(case, rounds)
    alone = steps.pop(ALONE)
    ideal = 1 + case.tower_work
    for way, took in steps.items():
        ratios = [one.step_s / other.step_s for one, other in zip(alone, took, strict=True)]
        causes = [lost(one, other, case.tower_work) for one, other in zip(took, alone, strict=True)]
        yield {
            "layout": name, "how": "replay" if replay else "wall", "pictures": rows.pictures, "even": rows.even,
            "small": rows.small, "tower_share": round(1 - 1 / ideal, 3), "way": way,
            "step_s": round(median(one.step_s for one in took), 4),
            "decoder_s": round(median(one.step_s for one in alone), 4),
            "ratio": round(median(ratios), 4), "efficiency": round(ideal * median(ratios), 4),
            "lost": {cause: round(median(one[cause] for one in causes), 4) for cause in causes[0]},
            "calls": calls.get(way), "rounds": rounds,
        }  # fmt: skip


def run_steps(case: Case, rounds: int) -> tuple[dict[str, list[Took]], dict[str, int]]:
    """By way, what steps of actors took, and the calls of one."""
    settings = {stage: settings_of(case.graph, stage, case.model, UPDATE) for stage in ENGINES}
    threads = max(1, (os.cpu_count() or 1) // case.graph.stage(TEXT).degrees.world)
    took, calls = dict[str, list[Took]](), dict[str, int]()
    with (
        fork_server(MODULES, gpus=False, sharing=True),
        started(case.graph, ENGINES, settings, threads=threads) as stages,
    ):
        groups = {stage: one.group for stage, one in stages.items()}
        submitted = [_counted(group) for group in groups.values()]
        steps = {
            way: (graph, make_stages(graph, groups), order, as_batch(data, ray.put))
            for way, (graph, order, data) in case.steps.items()
        }
        for way, (graph, of_way, order, batch) in [*steps.items()] * rounds:
            before = sum(map(sum, submitted))
            (seconds,), reports = timed(graph, of_way, order, batch, 1)
            calls[way] = (sum(map(sum, submitted)) - before) // STEPS
            took.setdefault(way, []).append(reported(seconds, reports))
    return took, calls


def replay_steps(case: Case, rounds: int) -> tuple[dict[str, list[Took]], dict[str, int]]:
    """By way, what steps would take whose ranks have a core each; no calls."""
    torch.set_num_threads(1)  # so that this process's seconds of CPU are those of the rank that works
    keep_freed_memory()
    one = pair_of(load_family(case.model))
    took = dict[str, list[Took]]()
    with join_alone():
        groups = {}
        for stage, engine in ENGINES.items():
            settings = settings_of(one, stage, case.model, UPDATE)
            groups[stage] = TimedHere(stage, *(engine(settings) for _ in range(case.graph.stage(stage).degrees.world)))
        for _ in range(rounds + 1):
            for way, (graph, order, data) in case.steps.items():
                for group in groups.values():
                    group.begin()
                train_step(make_stages(graph, groups), order, graph.ties, as_batch(data))
                took.setdefault(way, []).append(replayed(groups, graph, order))
    return {way: rest for way, (_, *rest) in took.items()}, {}


def _counted(group: Any) -> list[int]:
    """The actor calls of each submission to a group, from now on."""
    counts, submit = list[int](), group.execute_in_turn_async

    def counted(*calls: Any) -> Any:
        counts.append(group.size)
        return submit(*calls)

    group.execute_in_turn_async = counted
    return counts


def of_passes(graph: StageGraph, batch: int) -> StageGraph:
    """The same with passes of the tower over so many micro-batches."""
    return replace(graph, edges=tuple(replace(edge, batch=batch) for edge in graph.edges))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.text_ratio", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["1+1", "2+2", *CUT])
    parser.add_argument("--replay", action="store_true", help="each pass measured alone, played on devices of its own")
    parser.add_argument("--pictures", nargs="+", type=int, default=[1, 4, 16], help="of a row")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.3, 0.5], help="of operations, the tower's")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=["even", "uneven"], help="pictures")
    given = parser.parse_args(arguments)
    if given.replay and set(CUT) & set(given.layouts):
        parser.error(f"--replay measures ranks one by one, which {', '.join(CUT)} cuts rows over")
    command = command_of("text_ratio", arguments)
    for name, share, pictures, kind in product(given.layouts, given.shares, given.pictures, given.only):
        for row in of_case(name, share, Rows(pictures, *KINDS[kind]), given.rounds, given.replay):
            print(json.dumps(row | {"command": command}), flush=True)


if __name__ == "__main__":
    main()
