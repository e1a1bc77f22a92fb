"""`python -m experiments.layouts [--rounds N] [--sizes 1k 4k …]`: dhp's layouts and its peers on the same work."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch.multiprocessing as multiprocessing

from dhp.data.sample.sample import Sample
from experiments.layouts.links import H100, HOSTS, become_private, make_hosts, match
from experiments.layouts.ours import LAYOUTS, LOCAL, NAMES, run_layout
from experiments.layouts.peers import PEERS, serve_peer
from experiments.layouts.work import DECODERS, SIDES, SMALL_SHAPES, Run, count_tokens, make_batch, make_model
from experiments.two_hosts import network

LIMIT = "plain"
EQUAL = 1e-4  # of losses from the same weights
ALIKE = 1e-3  # after updates: those of the DeepSpeed peer differ by more than rounding
INSIDE = "--inside"


def run_peer(
    kind: str,
    model: str,
    batches: Mapping[str, Sequence[Sample]],
    steps: int,
    measure: bool = False,
    address: str = LOCAL,
) -> dict[str, Run]:
    """A peer in processes of its own: one with all threads for the plain model, else two, on two hosts where dhp has
    a Ray at `address`."""
    ranks = 1 if kind == LIMIT else 2
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        apart = ranks > 1 and address != LOCAL
        arguments = (ranks, str(Path(folder) / "store"), kind, model, batches, steps, measure, apart, answers)
        multiprocessing.spawn(serve_peer, arguments, nprocs=ranks)
    return answers.get()


def run(name: str, *arguments: Any) -> dict[str, Run]:
    """One of dhp's layouts, or a peer."""
    return run_peer(name, *arguments) if name in PEERS else run_layout(name, *arguments)


def compare(
    shape: str, model: str, sizes: Sequence[str], names: Sequence[str], rounds: int, steps: int, address: str
) -> Iterator[dict[str, Any]]:
    """A row for each layout or peer and each size: bytes of one step, then rounds that visit all of them in turn."""
    batches = {size: make_batch(size) for size in sizes}
    measured = {name: run(name, model, batches, 0, True, address) for name in names}
    losses = {size: {name: measured[name][size].loss for name in names} for size in sizes}
    for size in sizes:
        require_equal(losses[size], EQUAL if size == sizes[0] else ALIKE)
    timed = [{name: run(name, model, batches, steps, False, address) for name in names} for _ in range(rounds)]
    for size in sizes:
        seconds = {name: [s for found in timed for s in found[name][size].seconds] for name in names}
        for name in names:
            yield {
                "layout": name, "peer": name in PEERS, "shape": shape, "patches": SIDES[size] ** 2,
                "step_s": round(median(seconds[name]), 4),
                "tokens_per_s": round(count_tokens(batches[size]) / median(seconds[name]), 1),
                "efficiency": round(median(seconds[LIMIT]) / median(seconds[name]), 3),
                "peak_activation_bytes": measured[name][size].peak_bytes, "comm_bytes": measured[name][size].sent_bytes,
                "steps": len(seconds[name]), "loss": losses[size][name],
            }  # fmt: skip


def require_equal(losses: Mapping[str, float], tolerance: float) -> None:
    """Raises AssertionError unless all have done the same work. tolerance: relative."""
    if max(losses.values()) - min(losses.values()) > tolerance * max(losses.values()):
        raise AssertionError(f"losses after the same steps differ: {losses}")


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--shapes", nargs="+", choices=DECODERS, default=SMALL_SHAPES)
    parser.add_argument("--only", nargs="+", choices=[*PEERS, *NAMES])
    parser.add_argument("--links", action="store_true", help="two hosts and a slow link between them (root)")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    too_many = [name for name, spread in LAYOUTS.items() if given.links and spread.text.world > len(HOSTS)]
    given.only = given.only or [name for name in (*PEERS, *NAMES) if name not in too_many]
    for name in given.only:
        if name in too_many:
            parser.error(f"{name} needs {LAYOUTS[name].text.world} devices; with --links there are {len(HOSTS)}")
    return given


def slow_links(model: str) -> str:
    """Make the hosts and print what the link between them is. The address of their Ray."""
    matched, mbit = match(model)
    print(json.dumps({"h100": asdict(H100), "here": asdict(matched), "ratio": matched.ratio, "mbit": mbit}), flush=True)
    return make_hosts(mbit)


def main() -> None:
    given = read_arguments()
    names = [LIMIT, *(name for name in given.only if name != LIMIT)]
    try:
        if given.links and not given.inside:
            become_private(["experiments.layouts", *sys.argv[1:], INSIDE])
        with tempfile.TemporaryDirectory() as folder:
            models = {shape: str(make_model(Path(folder), shape)) for shape in given.shapes}
            address = slow_links(models[given.shapes[0]]) if given.links else LOCAL
            for shape, model in models.items():
                for row in compare(shape, model, given.sizes, names, given.rounds, given.steps, address):
                    print(json.dumps(row), flush=True)
    except network.Unavailable as reason:
        print(f"layouts: skipped: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
