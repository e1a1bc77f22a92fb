"""What one process does: an operation by itself, and training steps of images of all sizes."""

from __future__ import annotations

import resource
import time
from random import Random
from typing import Any

import torch

from dhp.cluster.host import keep_freed_memory
from experiments.layouts.peers import inputs_of, plain
from experiments.layouts.work import make_sample

SIDES = (16, 96)  # patches along a side of an image, at least and at most
ROWS, WIDTH, WIDER = 9216, 128, 384  # of the operation: one layer's of an image of 9,216 patches
OPERATIONS = 60


def operation_s() -> float:
    """Mean seconds of a product and an activation function whose results live as long as ten layers' do."""
    states, weight, results = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDER), []
    begin = time.perf_counter()
    for _ in range(OPERATIONS):
        results.append((states @ weight).relu())
        if len(results) > 10:
            results.clear()
    return (time.perf_counter() - begin) / OPERATIONS


def steps_s(model: str, steps: int) -> float:
    """Seconds of training steps of one to three images of any size, the same ones each time it is called."""
    step, random = plain(model), Random(0)
    begin = time.perf_counter()
    for number in range(steps):
        samples = [make_sample((1, _side(random), _side(random)), number) for _ in range(random.randint(1, 3))]
        step([inputs_of(sample) for sample in samples], sum(sample.target_tokens for sample in samples))
    return time.perf_counter() - begin


def _side(random: Random) -> int:
    return 2 * random.randint(SIDES[0] // 2, SIDES[1] // 2)


def measure(_rank: int, model: str, keep: bool, steps: int, answers: Any) -> None:
    """In a process of its own."""
    if keep and not keep_freed_memory():
        raise RuntimeError(
            "the environment chooses an allocator (MALLOC_…, GLIBC_TUNABLES, LD_PRELOAD), or it is not glibc"
        )
    found = {"operation_s": operation_s(), "steps_s": steps_s(model, steps)}
    about = resource.getrusage(resource.RUSAGE_SELF)
    answers.put(found | {"faults": about.ru_minflt, "peak_rss_mib": about.ru_maxrss >> 10})
