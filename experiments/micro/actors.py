"""A tensor from a vision to a text actor: by shared memory and by Ray's object store."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
from torch import Tensor

from dhp.batch.build import make_reader
from dhp.cluster.cluster import Cluster
from dhp.cluster.transport.shared_memory import OBJECT_STORE, SHARED_MEMORY
from dhp.core.tracing import BACKWARD, FORWARD, Span
from dhp.trainer.settings import feed_settings
from experiments.overhead.__main__ import ENGINES, configure, dhp_step, graph_of, settings_by_stage
from experiments.pair import as_batch, make_pair
from experiments.small import layout_of, started, wait_for

MEGABYTES, STEPS = 64, 3
PIXELS = 1024 * 14 * 14  # of an image, so that 16 of them are 16k patches


class Giver:
    """A vision rank whose output is ready."""

    def __init__(self) -> None:
        self.tensor = torch.ones(MEGABYTES << 18)
        self.copy = torch.empty_like(self.tensor).copy_(self.tensor)

    def forward_step(self, _micro_batch: int) -> Tensor:
        """Hand the tensor over."""
        self.tensor[0] += 1
        return self.tensor

    def memcpy_s(self) -> float:
        """Seconds of one copy into memory that was written to before."""
        begin = time.perf_counter()
        self.copy.copy_(self.tensor)
        return time.perf_counter() - begin

    def optimizer_step(self) -> None:
        """The step has ended."""


class Taker:
    """A text rank."""

    def forward_step(self, _micro_batch: int, tensor: Tensor) -> float:
        """Something of what came."""
        return float(tensor[0])


def handoff(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each transport of a tensor alone, then of whole steps."""
    for transport in (SHARED_MEMORY, OBJECT_STORE):
        yield handed_over(transport, given.rounds or 15)
    for transport in (SHARED_MEMORY, OBJECT_STORE):
        yield share_of_step(transport, min(given.rounds or STEPS, STEPS))


def handed_over(transport: str, rounds: int) -> dict[str, Any]:
    """From the moment when the tensor is ready in one actor until the other one's method begins with it."""
    passed, copied = [], []
    with tempfile.TemporaryDirectory() as folder:
        with Cluster(
            layout_of(make_pair(), folder, threads=os.cpu_count(), transport=transport, trace=True)
        ) as cluster:
            vision, text = cluster.groups["vision"], cluster.groups["text"]
            vision.start(Giver)
            text.start(Taker)
            for number in range(rounds + 2):
                (sent,) = vision.execute_all_async("forward_step", 0)
                (value,) = text.execute_all_async("forward_step", 0, *sent)
                vision.execute_all_async("optimizer_step", returns=0)
                (memcpy,) = vision.execute_all_async("memcpy_s")
                wait_for((vision, text))
                if ray.get(value[0]) != number + 2.0:
                    raise AssertionError(f"round {number} received the tensor of another round")
                found = _spans(cluster.groups)
                begin, end = _last(found["text"], FORWARD).start_ns, _last(found["vision"], FORWARD).end_ns
                passed.append((begin - end) / 1e9)
                copied.append(ray.get(memcpy[0]))
                del sent, value, memcpy  # the object store gives memory back when nobody refers to it
    ratio = median(p / c for p, c in zip(passed[2:], copied[2:], strict=True))
    row = {"transport": transport, "megabytes": MEGABYTES, "memcpy_s": median(copied[2:])}
    return row | {"handoff_s": median(passed[2:]), "ratio": ratio, "rounds": rounds}


def share_of_step(transport: str, rounds: int) -> dict[str, Any]:
    """At 16k patches a step: the time between one part's end and the other's begin, there and back, over the step's."""
    with tempfile.TemporaryDirectory() as name:
        config = configure(Path(name), 1, [f"data.min_pixels={PIXELS}", f"data.max_pixels={int(PIXELS * 1.1)}"])
        feed, graph = make_reader(feed_settings(config)), graph_of(config)
        shares, steps, patches = [], [], []
        own = {"threads": os.cpu_count(), "transport": transport, "trace": True}
        with started(graph, ENGINES, settings_by_stage(config, graph), **own) as stages:
            groups = {name: stage.group for name, stage in stages.items()}
            for number in range(rounds + 1):
                data = feed.step(number)
                batch = as_batch(data, ray.put)
                _spans(groups)
                begin = time.perf_counter()
                dhp_step(graph, stages, batch, 1)
                steps.append(time.perf_counter() - begin)
                shares.append(sum(_gaps(_spans(groups))) / steps[-1])
                patches.append(data.info.vision_tokens)
    row = {"transport": transport, "patches": median(patches[1:]), "step_s": median(steps[1:])}
    return row | {"transfer_share": median(shares[1:]), "rounds": rounds}


def _spans(groups: Mapping[str, Any]) -> dict[str, list[Span]]:
    """What both actors did since the last time."""
    return {name: ray.get(group.take_spans_async()[0]) for name, group in groups.items()}


def _last(found: list[Span], kind: str) -> Span:
    return [span for span in found if span.kind == kind][-1]


def _gaps(found: Mapping[str, list[Span]]) -> Iterator[float]:
    """Seconds on the way there and on the way back."""
    for kind, sender, receiver in ((FORWARD, "vision", "text"), (BACKWARD, "text", "vision")):
        yield (_last(found[receiver], kind).start_ns - _last(found[sender], kind).end_ns) / 1e9
