"""`python -m experiments.compile [--only NAME …] [--steps N] [--threads N]`: steps with compiled layers beside others.

One process, float32 on a CPU; both take the same samples (those of `experiments.families`) in turn. A JSON line each:
{family, ratio, plain_step_s, compiled_step_s, warm_up_s, deviation, …}; `ratio` is the median over steps of the plain
seconds to the compiled ones, so above 1 compiled layers are faster. Warm-up is what the first steps of both take, in
which layers are compiled, on the wall; `deviation` is the largest relative one of a step's loss, over all steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers.utils import logging

from dhp.cluster.host import keep_freed_memory
from experiments.families.models import save_model
from experiments.families.work import Data, Ours
from experiments.pair import join_alone
from tests.helpers.tiny_families import FAMILIES

DEFAULT = ("qwen2_5_vl", "llava_clip")
WARM_UP = 3  # steps: of one length, then of any, and one more


def measure(name: str, steps: int) -> dict[str, Any]:
    """The line of one model."""
    with tempfile.TemporaryDirectory() as folder, join_alone():
        model = save_model(name, Path(folder))
        data = Data(model)
        # The compiled one last: what computes attention is registered by name, and cuts compiled layers.
        plain, compiled = Ours(model, data), Ours(model, data, compiled=True)
        taken, worst, begin = [], 0.0, time.perf_counter()
        for number in range(WARM_UP + steps):
            if number == WARM_UP:
                warm_up_s = time.perf_counter() - begin
            batch = data.step(number)
            seconds, loss = {}, {}
            for way in (plain, compiled) if number % 2 else (compiled, plain):
                seconds[way], loss[way] = way.step(way.shard(batch))
            taken.append((seconds[plain], seconds[compiled]))
            worst = max(worst, abs(loss[compiled] / loss[plain] - 1))
    before, after = (median(side) for side in zip(*taken[WARM_UP:], strict=True))
    return {
        "family": name,
        "ratio": round(median(p / c for p, c in taken[WARM_UP:]), 3),
        "plain_step_s": round(before, 3),
        "compiled_step_s": round(after, 3),
        "warm_up_s": round(warm_up_s, 1),
        "deviation": float(f"{worst:.1e}"),
        "threads": torch.get_num_threads(),
        "steps": steps,
    }


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(DEFAULT), metavar="NAME")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(given.threads)
    keep_freed_memory()
    for name in given.only:
        torch.compiler.reset()
        print(json.dumps(measure(name, given.steps)), flush=True)


if __name__ == "__main__":
    main()
