"""`python -m experiments.micro [--only QUESTION …] [--rounds N]`: small questions, as JSON lines.

compile: steps with compiled layers beside others. kernels: with dhp's kernels beside the library's own code.
handoff: a tensor from a vision to a text actor, against one copy of it; all of a step's at 16k patches.
tensor_host: what a decoder layer costs the host, cut and whole.
checkpoint: how long saving holds training up, beside torch's distributed checkpoint.
reading: conversations as tokens with labels, beside their tokenizer alone.
experts: experts shared out among two replicas, or cut over two tensor ranks."""

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

from experiments.micro import layers, reading, transfers

# From the arguments to the lines. A further question is a function and a line here.
QUESTIONS: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "compile": layers.compiled, "kernels": layers.kernels, "handoff": transfers.handoff,
    "tensor_host": layers.tensor_host, "checkpoint": transfers.checkpoint,
    "reading": reading.reading,
    "experts": lambda given: iter(layers.compare(given.rounds or 15, given.tokens)),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(QUESTIONS), default=list(QUESTIONS), metavar="QUESTION")
    parser.add_argument("--rounds", type=int, help="or steps; each question's own by default")
    parser.add_argument(
        "--families", nargs="+", help="of compile and kernels, as tests/helpers/tiny_families.py names them"
    )
    parser.add_argument("--tokens", type=int, default=256, help="of a sample of experts")
    parser.add_argument("--mb", type=int, default=500, help="of checkpoint")
    given = parser.parse_args()
    for question in given.only:
        for row in QUESTIONS[question](given):
            print(json.dumps({"question": question} | row), flush=True)


if __name__ == "__main__":
    main()
