"""`python -m experiments.finetuning [--rounds N] [--only QUESTION …]`: steps that train some of a model, side by side.

One process and thread, the product's trainers and step; rounds of all that is compared are interleaved, and ratios are
medians over rounds, of CPU seconds. A JSON line for each way to train, with the `question` that it belongs to:

frozen: a tower that stays as it is, and its projector alone, beside full training.
lora, lora_even: adapters beside full training, and beside peft in a plain loop; of samples of mixed lengths, or of one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers.utils import logging

from dhp.cluster.host import keep_freed_memory
from experiments.finetuning import ways

# What is asked: from a number of rounds to its lines. A further comparison is a module and a line here.
QUESTIONS: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
    "frozen": ways.measure,
    "lora": ways.measure_lora,
    "lora_even": partial(ways.measure_lora, even=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", nargs="+", choices=list(QUESTIONS), default=list(QUESTIONS), metavar="QUESTION")
    given = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # so that the process's seconds are those of the work
    keep_freed_memory()  # as dhp's ranks do
    for question in given.only:
        for row in QUESTIONS[question](given.rounds):
            print(json.dumps({"question": question} | row), flush=True)


if __name__ == "__main__":
    main()
