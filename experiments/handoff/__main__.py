"""`python -m experiments.handoff [--rounds N]`: a tensor from a vision to a text actor, against one memcpy of it."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
from torch import Tensor

from dhp.batch.reader import make_reader
from dhp.cluster.cluster import Cluster
from dhp.cluster.hangs.watch import wait_all
from dhp.cluster.transport.shared_memory import OBJECT_STORE, SHARED_MEMORY
from dhp.core.tracing import BACKWARD, FORWARD, Span
from dhp.plan.batches import feed_settings
from experiments.overhead.__main__ import configure, dhp_step, graph_of, one_actor_each, start
from experiments.pair import as_batch, make_pair

MEGABYTES = 64
TIMEOUT_S = 600.0
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


def spans(cluster: Cluster) -> dict[str, list[Span]]:
    """What both actors did since the last time."""
    return {name: ray.get(group.take_spans_async()[0]) for name, group in cluster.groups.items()}


def last_of(found: list[Span], kind: str) -> Span:
    """The last span of a kind."""
    return [span for span in found if span.kind == kind][-1]


def handoffs(transport: str, rounds: int) -> dict[str, Any]:
    """From the moment when the tensor is ready in one actor until the other one's method begins with it."""
    passed, copied = [], []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cluster = stack.enter_context(Cluster(one_actor_each(make_pair(), folder, transport, trace=True)))
        vision, text = cluster.groups["vision"], cluster.groups["text"]
        vision.start(Giver)
        text.start(Taker)
        for number in range(rounds + 2):
            (given,) = vision.execute_all_async("forward_step", 0)
            (value,) = text.execute_all_async("forward_step", 0, *given)
            vision.execute_all_async("optimizer_step", returns=0)
            (memcpy,) = vision.execute_all_async("memcpy_s")
            wait_all([*vision.take_watched(), *text.take_watched()], TIMEOUT_S)
            if ray.get(value[0]) != number + 2.0:
                raise AssertionError(f"round {number} received the tensor of another round")
            found = spans(cluster)
            passed.append((last_of(found["text"], FORWARD).start_ns - last_of(found["vision"], FORWARD).end_ns) / 1e9)
            copied.append(ray.get(memcpy[0]))
            del given, value, memcpy  # the object store gives memory back when nobody refers to it
    return {
        "transport": transport,
        "megabytes": MEGABYTES,
        "memcpy_s": median(copied[2:]),
        "handoff_s": median(passed[2:]),
        "ratio": median(p / c for p, c in zip(passed[2:], copied[2:], strict=True)),
        "rounds": rounds,
    }


def share_of_step(transport: str, rounds: int) -> dict[str, Any]:
    """At 16k patches a step: the time between one part's end and the other's begin, there and back, over the step's."""
    with tempfile.TemporaryDirectory() as name:
        config = configure(Path(name), 1, [f"data.min_pixels={PIXELS}", f"data.max_pixels={int(PIXELS * 1.1)}"])
        feed = make_reader(feed_settings(config))
        shares, steps, patches = [], [], []
        graph = graph_of(config)
        with Cluster(one_actor_each(graph, name, transport, trace=True)) as cluster:
            stages = start(cluster, graph, config)
            for number in range(rounds + 1):
                data = feed.step(number)
                batch = as_batch(data, ray.put)
                spans(cluster)
                begin = time.perf_counter()
                dhp_step(graph, stages, batch, 1)
                steps.append(time.perf_counter() - begin)
                shares.append(sum(_gaps(spans(cluster))) / steps[-1])
                patches.append(data.info.vision_tokens)
    return {
        "transport": transport,
        "patches": median(patches[1:]),
        "step_s": median(steps[1:]),
        "transfer_share": median(shares[1:]),
        "rounds": rounds,
    }


def _gaps(found: Mapping[str, list[Span]]) -> Iterator[float]:
    """Seconds on the way there and on the way back."""
    for kind, sender, receiver in ((FORWARD, "vision", "text"), (BACKWARD, "text", "vision")):
        yield (last_of(found[receiver], kind).start_ns - last_of(found[sender], kind).end_ns) / 1e9


def main() -> None:
    """Print a JSON line for each transport and figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    for transport in (SHARED_MEMORY, OBJECT_STORE):
        print(json.dumps(handoffs(transport, given.rounds)), flush=True)
    for transport in (SHARED_MEMORY, OBJECT_STORE):
        print(json.dumps(share_of_step(transport, given.steps)), flush=True)


if __name__ == "__main__":
    main()
