"""How slow a link must be, for what a tower computes here, to be what NVLink is on 8 H100.

The measure is the time that a tower layer under tensor parallelism communicates over the time that it computes. Each
rank sends four all-reduces of its hidden states (two forward, two backward), 2 (N−1)/N of them each, and does a share
1/N of 6 (4 H² + 3 H I) operations for every patch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from experiments.layouts.peers import load
from experiments.layouts.work import TOWER, make_batch

ROUNDS = 3


@dataclass(frozen=True)
class Machine:
    """Ranks that share a tower. operations_per_s: of one rank; link_bytes_per_s: from one rank to the others."""

    ranks: int
    hidden: int
    intermediate: int
    element_bytes: int
    operations_per_s: float
    link_bytes_per_s: float

    @property
    def bytes_a_patch(self) -> float:
        """Sent by a rank in a layer, forward and backward."""
        return 4 * 2 * (self.ranks - 1) / self.ranks * self.hidden * self.element_bytes

    @property
    def operations_a_patch(self) -> float:
        """Of a rank in a layer's matrices, forward and backward; each multiply-add is two."""
        return 6 * (4 * self.hidden**2 + 3 * self.hidden * self.intermediate) / self.ranks

    @property
    def ratio(self) -> float:
        """Seconds of communication for one of computation."""
        compute_s = self.operations_a_patch / self.operations_per_s
        return self.bytes_a_patch / self.link_bytes_per_s / compute_s


# Qwen2.5-VL's tower in bfloat16; 40% of the 989 TFLOP/s that the maker's data sheet gives for dense matrices, and all
# of NVLink's 450 GB/s in one direction.
H100 = Machine(8, 1280, 3420, 2, 0.4 * 989e12, 450e9)


def match(model: str) -> tuple[Machine, float]:
    """This machine's two ranks with a link of the H100s' ratio, and its rate in megabits a second."""
    measured = Machine(2, TOWER["hidden_size"], TOWER["intermediate_size"], 4, _operations_per_s(model), 1.0)
    seconds = measured.operations_a_patch / measured.operations_per_s * H100.ratio
    rate = measured.bytes_a_patch / seconds
    return Machine(2, measured.hidden, measured.intermediate, 4, measured.operations_per_s, rate), rate * 8 / 1e6


def _operations_per_s(model: str) -> float:
    """Of one thread, in the tower's matrices, forward and backward."""
    torch.set_num_threads(1)
    tower = load(model).model.visual
    (sample, *_), best = make_batch("1k"), float("inf")
    pixels, grids = torch.cat([torch.from_numpy(p) for p in sample.pixels]), torch.tensor(sample.grids)
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        tower(pixels, grid_thw=grids).last_hidden_state.sum().backward()
        best = min(best, time.perf_counter() - begin)
    one = Machine(1, TOWER["hidden_size"], TOWER["intermediate_size"], 4, 1.0, 1.0)
    return one.operations_a_patch * TOWER["depth"] * len(pixels) / best
