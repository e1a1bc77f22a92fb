"""`python -m experiments.families [--only NAME …] [--steps N] [--threads N] [--even]`: each family beside
a plain loop.

One process, float32; both take the same samples in the same micro-batches, in turn. One thread is timed by its own
seconds, several by the clock on the wall, which is of no use on a machine that others use. A JSON line for each model:
{family, ratio, dhp_samples_s, plain_samples_s, …}; `ratio` is the median over steps of the plain loop's seconds to
dhp's for the same samples, so above 1 dhp is faster.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers.utils import logging

from dhp.cluster.host import keep_freed_memory
from experiments.families.work import MICRO_BATCHES, ROWS, Data, MicroBatches, Ours, Plain, save_model
from experiments.pair import TEXT, VISION, join_alone
from tests.helpers.tiny_families import FAMILIES

CLOSE = 1e-4  # relative: the two losses of the first step, before any update


def measure(name: str, steps: int, even: bool = False) -> dict[str, Any]:
    """The line of one model. Raises AssertionError where the two do not train the same."""
    with tempfile.TemporaryDirectory() as folder, join_alone():
        model = save_model(name, Path(folder))
        data = Data(model, even)
        plain, ours = Plain(model, data), Ours(model, data)
        batches = [data.step(number) for number in range(steps + 1)]
        taken = []
        for number, batch in enumerate(batches):
            pair = [(plain, plain.shard(batch)), (ours, ours.shard(batch))]
            seconds, loss = {}, {}
            # Every other step the other way around: who comes second finds the samples in the caches.
            for way, dealt in pair if number % 2 else pair[::-1]:
                seconds[way], loss[way] = way.step(dealt)
            if number == 0 and not abs(loss[ours] / loss[plain] - 1) < CLOSE:
                raise AssertionError(f"{name}: dhp's first loss is {loss[ours]}, the plain loop's {loss[plain]}")
            taken.append((seconds[ours], seconds[plain]))
        return _row(name, data, plain, taken[1:], batches[1:])


def _row(
    name: str, data: Data, plain: Plain, taken: Sequence[tuple[float, float]], batches: Sequence[MicroBatches]
) -> dict[str, Any]:
    text = data.family.config.get_text_config()
    samples = MICRO_BATCHES * ROWS
    lengths = [[len(sample.input_ids) for sample in row] for batch in batches for row in batch]
    padded = sum(max(row) * len(row) for row in lengths)
    mine, theirs = (median(side) for side in zip(*taken, strict=True))
    return {
        "family": name,
        "ratio": round(median(p / o for o, p in taken), 3),
        "dhp_samples_s": round(samples / mine, 2),
        "plain_samples_s": round(samples / theirs, 2),
        "dhp_step_s": round(mine, 3),
        "plain_step_s": round(theirs, 3),
        "parameters_m": round(sum(p.numel() for p in plain.model.parameters()) / 1e6, 1),
        "hidden": text.hidden_size,
        "layers": {TEXT: text.num_hidden_layers, VISION: len(data.family.tower.layers.kinds)},
        "vocabulary": text.vocab_size,
        "samples": samples,
        "micro_batches": MICRO_BATCHES,
        "tokens": round(sum(map(sum, lengths)) / len(batches)),
        "image_tokens": round(sum(int((s.mm_token_type_ids > 0).sum()) for b in batches for row in b for s in row)
                              / len(batches)),
        "shortest": min(map(min, lengths)),
        "longest": max(map(max, lengths)),
        "lengths": "even" if len({length for row in lengths for length in row}) == 1 else "mixed",
        "padding": round(1 - sum(map(sum, lengths)) / padded, 2),
        "threads": torch.get_num_threads(),
        "steps": len(taken),
    }  # fmt: skip


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--even", action="store_true", help="samples of one length: packing gains nothing")
    given = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(given.threads)
    keep_freed_memory()  # as dhp's ranks do, for both
    for name in given.only:
        print(json.dumps(measure(name, given.steps, given.even)), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
