"""dhp on the same work: two vision and two text actors that share two cores in each layout, or four and four."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import ray

from dhp.base.degrees import Degrees
from dhp.base.messages import StageReport, StepData
from dhp.batching.loader import Feed
from dhp.cluster.cluster import Cluster, Layout
from dhp.cluster.watch import Watched, wait_all
from dhp.config.degrees import DEEPSPEED, FSDP
from dhp.data.order.sampler import BatchLayout, slots
from dhp.data.sample import Sample
from dhp.data.source import StepSamples
from dhp.models.registry import load_family
from dhp.planner.costs import Arrangement
from dhp.step.schedule import TEXT, VISION, sequential
from dhp.step.stages import Batch, Parts, make_parts
from dhp.step.step import train_step
from dhp.trainers.settings import PartSettings, UpdateSettings
from dhp.trainers.text import TextTrainer
from dhp.trainers.vision import VisionTrainer
from experiments.layouts.peers import LEARNING_RATE
from experiments.layouts.work import Run

LOCAL = "local"
TIMEOUT_S = 900.0
TWO = {name: Degrees(**{name: 2}) for name in ("data", "ulysses", "tensor")}


@dataclass(frozen=True)
class Spread:
    """Degrees of both parts, and the ZeRO stage and engine of each. Device k has rank k of both."""

    vision: Degrees
    text: Degrees
    vision_stage: int = 0
    text_stage: int = 0
    text_engine: str = DEEPSPEED


# The last two have four ranks a part: torch cuts the states of replicas beside tensor parallelism, or nobody does.
FOUR = Degrees(data=2, ulysses=2), Degrees(data=2, tensor=2)
LAYOUTS = {
    "DP": Spread(TWO["data"], TWO["data"]),
    "SP+TP": Spread(TWO["ulysses"], TWO["tensor"]),
    "TP": Spread(TWO["tensor"], TWO["tensor"]),
    "DP+TP": Spread(TWO["data"], TWO["tensor"]),
    "SP+DP": Spread(TWO["ulysses"], TWO["data"]),
    "ZeRO-3": Spread(TWO["data"], TWO["data"], 3, 3),
    "TP+replicas": Spread(*FOUR),
    "TP+FSDP": Spread(*FOUR, text_stage=3, text_engine=FSDP),
}
UPDATE = UpdateSettings(LEARNING_RATE, (0.9, 0.999), 1e-8, 0.01, "constant", 0, 10**6, None)


def part_settings(
    part: str, model: str, degrees: Degrees, zero_stage: int, measure: bool, engine: str = DEEPSPEED
) -> PartSettings:
    """Float32, packed rows, no recompute. measure: count what activations take, which costs time."""
    return PartSettings(
        part=part,
        model_name=model,
        degrees=degrees,
        dtype="float32",
        device="cpu",
        recompute="none",
        measure=measure,
        zero_stage=zero_stage,
        zero_engine=engine,
        autotp=False,
        packing=True,
        update=UPDATE,
        seed=0,
    )


def deal(model: str, vision: Degrees, text: Degrees, samples: Sequence[Sample]) -> StepData:
    """The step's samples dealt out to the ranks, one micro-batch."""

    def step(k: int) -> StepSamples:
        dealt = slots(list(samples), BatchLayout(text.data, 1, -(-len(samples) // text.data)))
        return StepSamples(k, 0, tuple(tuple(tuple(slot) for slot in row) for row in dealt), ())

    source: Any = SimpleNamespace(step=step)
    return Feed(source, load_family(model), 0, vision.data, vision.sequence, packing=True).step(0)


def run_layout(
    name: str,
    model: str,
    batches: Mapping[str, Sequence[Sample]],
    steps: int,
    measure: bool = False,
    address: str = LOCAL,
) -> dict[str, Run]:
    """Of every batch, `steps` steps after one that does not count. measure: bytes of the last. address: of a Ray."""
    spread = LAYOUTS[name]
    vision, text = spread.vision, spread.text
    with tempfile.TemporaryDirectory() as folder, Cluster(_layout(spread, folder, address)) as cluster:
        groups = cluster.groups
        first = part_settings("vision", model, vision, spread.vision_stage, measure)
        second = part_settings("text", model, text, spread.text_stage, measure, spread.text_engine)
        groups["vision"].start(VisionTrainer, first)
        groups["text"].start(TextTrainer, second)
        wait_all([w for group in groups.values() for w in group.take_watched()], TIMEOUT_S)
        parts = make_parts(groups["vision"], groups["text"], vision, text, 1)
        found = {}
        for size, samples in batches.items():
            data = deal(model, vision, text, samples)
            refs = [[[ray.put(work) for work in row] for row in side] for side in (data.vision, data.text)]
            seconds, reports = _train(parts, Batch(ray.put(data.info), *refs), steps)
            loss = sum(report.loss for report in parts[TEXT].leaders(reports[TEXT]))
            found[size] = Run(seconds, loss, *(_bytes(reports) if measure else ()))
    return found


def _train(parts: Parts, batch: Batch, steps: int) -> tuple[tuple[float, ...], dict[int, list[StageReport]]]:
    """Seconds from the end of each step to the end of the next one, and what all ranks tell of the last. As in a run,
    the next step is submitted while one runs."""
    ends, following = [], _submit(parts, batch)
    for step in range(steps + 1):
        watched, reports = following
        if step < steps:
            following = _submit(parts, batch)
        wait_all(watched, TIMEOUT_S)
        ends.append(time.perf_counter())
    return tuple(end - begin for begin, end in pairwise(ends)), {part: ray.get(refs) for part, refs in reports.items()}


def _submit(parts: Parts, batch: Batch) -> tuple[list[Watched], dict[int, list[Any]]]:
    submitted = train_step(parts, sequential(1), batch)
    return [w for part in parts.values() for w in part.group.take_watched()], submitted.reports


def _bytes(reports: Mapping[int, Sequence[StageReport]]) -> tuple[int, int]:
    """Peak of activations on the fuller device, and bytes sent by all: device k has rank k of both parts."""
    taking_turns = Arrangement(shared=True, outstanding=1, together=False)
    peaks = []
    for vision, text in zip((r.usage for r in reports[VISION]), (r.usage for r in reports[TEXT]), strict=True):
        held = vision.before_bytes + sum(layer.held_bytes for layer in vision.layers) + vision.after_bytes
        peaks.append(taking_turns.device_bytes(held, vision.peak_bytes, text.peak_bytes))
    return max(peaks), sum(sum(r.sent_bytes.values()) for of_part in reports.values() for r in of_part)


def _layout(spread: Spread, folder: str, address: str) -> Layout:
    return Layout(
        actors={"vision": spread.vision.world, "text": spread.text.world},
        degrees={"vision": asdict(spread.vision), "text": asdict(spread.text)},
        collocate=True,
        device="cpu",
        address=address,
        threads=1,
        start_timeout_s=TIMEOUT_S,
        step_timeout_s=TIMEOUT_S,
        log_dir=folder,
        checkpoint_dir=folder,
    )
