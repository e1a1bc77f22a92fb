"""`python -m experiments.text_ratio [--rounds 5] [--layouts 1+1 …] [--pictures 1 4 16] [--shares .1 .3 .5]`: a step of
the whole model beside one of its decoder alone, on text rows of the same lengths, by the same actors."""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray

from dhp.batch.encoder_shards import Split
from dhp.batch.reader import BatchReader
from dhp.batch.shard import Division
from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, StepData
from dhp.core.graph import StageGraph
from dhp.data.sample.sample import Sample
from dhp.data.sampling.sampler import BatchLayout
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.stage_settings import OptimizerSettings
from dhp.engine.text_engine import TextEngine
from dhp.models.registry import load_family
from dhp.step.schedule import make_schedule
from dhp.step.stages import make_stages
from experiments.commands import command_of
from experiments.pair import ONE, TEXT, VISION, as_batch, pair_of, settings_of
from experiments.small import IMAGE, PATCH_VALUES, WORD_IDS, dealer, save_even_model, started, timed

MICRO_BATCHES, WORDS, FEATURES = 8, 128, 256  # of a step; of a row: tokens of text, and those of its pictures
LAYOUTS = {
    "1+1": (ONE, ONE), "2+2": (Degrees(data=2), Degrees(data=2)),
    "2+2 SP+TP": (Degrees(ulysses=2), Degrees(tensor=2)),
}  # fmt: skip
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


def of_case(name: str, share: float, rows: Rows, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each way to order the tower's passes. Rounds are interleaved; of each the second step counts."""
    degrees = LAYOUTS[name]
    samples = rows.samples(MICRO_BATCHES * degrees[1].data)
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(Path(folder), share, samples, degrees)
        work = deal(model, degrees, samples, 1).info.flops
        graph = pair_of(load_family(model), *degrees)
        settings = {stage: settings_of(graph, stage, model, UPDATE) for stage in (VISION, TEXT)}
        threads = max(1, (os.cpu_count() or 1) // degrees[1].world)
        with started(graph, ENGINES, settings, threads=threads) as stages:
            groups = {stage: own.group for stage, own in stages.items()}
            submitted = [_counted(group) for group in groups.values()]
            found, steps, calls = dict[str, list[float]](), dict[str, Any](), dict[str, int]()
            text = deal(model, degrees, list(map(as_text, samples)), 1)
            for way, (schedule, batch) in {"decoder alone": ("sequential", 1), **WAYS}.items():
                own = of_passes(graph, batch)
                data = text if way not in WAYS else deal(model, degrees, samples, batch)
                order = make_schedule(schedule, own, MICRO_BATCHES)
                steps[way] = (own, make_stages(own, groups), order, as_batch(data, ray.put))
            for _ in range(rounds):
                for way, (own, of_way, order, batch_refs) in steps.items():
                    before = sum(map(sum, submitted))
                    seconds, _reports = timed(own, of_way, order, batch_refs, 1)
                    calls[way] = (sum(map(sum, submitted)) - before) // STEPS
                    found.setdefault(way, []).append(seconds[0])
    ideal = 1 + work[VISION] / work[TEXT]
    alone = found.pop("decoder alone")
    for way, seconds in found.items():
        ratios = [one / other for one, other in zip(alone, seconds, strict=True)]
        yield {
            "layout": name, "pictures": rows.pictures, "even": rows.even, "small": rows.small,
            "tower_share": round(1 - 1 / ideal, 3), "way": way, "step_s": round(median(seconds), 4),
            "decoder_s": round(median(alone), 4),
            "ratio": round(median(ratios), 4), "efficiency": round(ideal * median(ratios), 4),
            "calls": calls[way], "rounds": rounds,
        }  # fmt: skip


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
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--pictures", nargs="+", type=int, default=[1, 4, 16], help="of a row")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.3, 0.5], help="of operations, the tower's")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=["even", "uneven"], help="pictures")
    given = parser.parse_args(arguments)
    command = command_of("text_ratio", arguments)
    for name, share, pictures, kind in product(given.layouts, given.shares, given.pictures, given.only):
        for row in of_case(name, share, Rows(pictures, *KINDS[kind]), given.rounds):
            print(json.dumps(row | {"command": command}), flush=True)


if __name__ == "__main__":
    main()
