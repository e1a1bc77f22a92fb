"""`python -m experiments.long_context [--only QUESTION …] [--budget-mib 8]`: long rows of the decoder, as JSON lines.

longest: the longest row within a budget of activations, on one rank against plain transformers, and on several.
longest_kept: the same where nothing is recomputed, within eight times the budget, on up to eight ranks.
steps: seconds of a step on four ranks that share a row, in each way, beside transformers with DeepSpeed's Ulysses.
longest_prompt: the longest prompt within a budget of all that prefill takes, on one rank and on several.
inference: seconds to the first token and tokens a second of an answer to a long prompt, beside transformers.
video: what each process holds of a ten-minute video, decoded whole and by one, two and four vision ranks.
sampler: how much of long and short samples is divided without need, by how rows are made and how they are divided;
    with --plot a picture of it.
schedule: when each rank computes which layer of a prompt; with --plot a picture of it.
long_sets: rows, Pad, Dist and SP-Ratio of a long and of a mixed set by sampler.
two_stages: what it is worth to deal pictures out evenly first, beside giving each to the rank that has its tokens."""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers.utils import logging

from experiments.long_context import inference, long_sets, steps, video
from experiments.long_context.work import LAYERS, make_model

# What is asked: from a model and the arguments to its lines. A further question is a module and a line here.
QUESTIONS: dict[str, Callable[[str, argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "longest": lambda model, given: steps.measure_longest(model, given.budget_mib),
    "longest_kept": lambda model, given: steps.measure_longest(
        model, steps.KEPT_MIB * given.budget_mib, steps.KEPT_WAYS
    ),
    "longest_prompt": lambda model, given: steps.measure_prompts(model, given.budget_mib), "steps": steps.measure,
    "inference": inference.measure, "video": video.measure, "sampler": long_sets.measure_sampler,
    "long_sets": long_sets.measure, "schedule": inference.measure_schedule, "two_stages": video.measure_two_stages,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(QUESTIONS), default=list(QUESTIONS), metavar="QUESTION")
    parser.add_argument("--budget-mib", type=int, default=8, help="for activations of a rank, or for a prompt")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 13, 1 << 14, 1 << 15, 1 << 16, 1 << 17])
    parser.add_argument("--rounds", type=int, default=3, help="of steps; one where a row has 131,072 tokens or more")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the decoder; fewer for the longest rows")
    parser.add_argument("--minutes", type=int, default=video.MINUTES, help="of the video")
    parser.add_argument("--plot", type=Path, help="PNG of sampler or schedule")
    given = parser.parse_args()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), given.layers)
        for question in given.only:
            for row in QUESTIONS[question](model, given):
                print(json.dumps({"question": question} | row), flush=True)


if __name__ == "__main__":
    main()
