"""`python -m experiments.kernels [--only NAME …] [--steps N] [--threads N] [--dtype float32]`: steps with dhp's kernels
for norms, rotary positions and gates beside the library's own code.

One process; both take the same samples (those of `experiments.families`) in turn. A JSON line each: {family, dtype,
ratio, plain_step_s, kernels_step_s, deviation, kernels, …}; `ratio` is the median over steps of the plain seconds to
those with kernels, so above 1 these are faster; `deviation` is the largest relative one of a step's loss.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers.utils import logging

from dhp.cluster.host import keep_freed_memory
from dhp.config.rules import KERNELS, PLAIN
from experiments.families.models import save_model
from experiments.families.work import Data, Ours
from experiments.pair import join_alone
from tests.helpers.tiny_families import FAMILIES

DEFAULT = ("qwen2_5_vl", "qwen3_vl", "llava_clip", "gemma3", "glm4v")
WARM_UP = 2  # steps


def measure(name: str, steps: int, dtype: str = "float32") -> dict[str, Any]:
    """The line of one model."""
    with tempfile.TemporaryDirectory() as folder, join_alone():
        model = save_model(name, Path(folder))
        data = Data(model)
        plain = Ours(model, data, dtype=dtype, kernels=dict.fromkeys(KERNELS, PLAIN))
        ours = Ours(model, data, dtype=dtype)
        taken, worst = [], 0.0
        for number in range(WARM_UP + steps):
            batch = data.step(number)
            seconds, loss = {}, {}
            for way in (plain, ours) if number % 2 else (ours, plain):
                seconds[way], loss[way] = way.step(way.shard(batch))
            taken.append((seconds[plain], seconds[ours]))
            worst = max(worst, abs(loss[ours] / loss[plain] - 1))
        served = {use.kind: use.kernel for trainer in ours.trainers.values() for use in trainer.describe_kernels()}
    before, after = (median(side) for side in zip(*taken[WARM_UP:], strict=True))
    return {
        "family": name,
        "dtype": dtype,
        "ratio": round(median(p / o for p, o in taken[WARM_UP:]), 3),
        "plain_step_s": round(before, 3),
        "kernels_step_s": round(after, 3),
        "deviation": float(f"{worst:.1e}"),
        "kernels": {kind: served[kind] for kind in KERNELS if kind in served},
        "threads": torch.get_num_threads(),
        "steps": steps,
    }


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(DEFAULT), metavar="NAME")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    given = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(given.threads)
    keep_freed_memory()
    for name in given.only:
        print(json.dumps(measure(name, given.steps, given.dtype)), flush=True)


if __name__ == "__main__":
    main()
