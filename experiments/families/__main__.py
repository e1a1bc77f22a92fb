"""`python -m experiments.families [--rounds N] [--only CASE …]`: a step of each declared family beside a plain loop.

One process and thread, tiny models made wide (`experiments.loops`), the product's trainers and step with packed rows;
the plain loop pads. Rounds of all that is compared are interleaved, and ratios are medians over rounds, of CPU seconds.
A JSON line for each family and `samples`: `mixed` lengths, or `even`, all of one, where packing gains nothing. Of
families whose layers carry state along a row also `by_segment`: the same step with each sample's state by itself.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers.utils import logging

from dhp.cluster.host import keep_freed_memory
from dhp.engine.text_engine import TextEngine
from experiments.loops import Data, Ours, Plain, save_model
from experiments.pair import TEXT, join_alone
from tests.helpers.tiny_families import FAMILIES

WARM_UP = 2  # rounds, which fill caches
MIXED, EVEN = "mixed", "even"


class BySegment(TextEngine):
    """A decoder whose layers with state take each sample of a row by itself."""

    def _find_row_ranks(self) -> None:
        return None


def compare(ways: Mapping[str, Any], data: Data, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way's steps, in turns. Raises ValueError for a first loss that differs from the others'."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM_UP + rounds):
        samples = data.step(number)
        losses = {}
        for name in list(ways)[:: 1 if number % 2 else -1]:
            seconds, losses[name] = ways[name].step(ways[name].shard(samples))
            taken[name] += [seconds] if number >= WARM_UP else []
        if number == 0 and max(losses.values()) > min(losses.values()) * 1.001:
            raise ValueError(f"the ways have other losses of the same samples: {losses}")
    return taken


def measure(case: str, samples: str, rounds: int) -> dict[str, Any]:
    """The row of a family. ratio: the plain loop's seconds over dhp's; by_segment: dhp's with each sample's state by
    itself, over those with packed rows."""
    with tempfile.TemporaryDirectory() as folder, join_alone():
        model = save_model(case, Path(folder))
        data = Data(model, even=samples == EVEN)
        ways: dict[str, Any] = {"dhp": Ours(model, data), "plain": Plain(model, data)}
        if data.family.decoder.mixers:
            ways["by_segment"] = Ours(model, data, trainers={TEXT: BySegment})
        taken = compare(ways, data, rounds)
    row = {"family": case, "samples": samples, "rounds": rounds, "step_s": round(median(taken["dhp"]), 3)}
    for key, way in (("ratio", "plain"), ("by_segment", "by_segment")):
        if way in taken:
            row[key] = round(median(o / d for o, d in zip(taken[way], taken["dhp"], strict=True)), 3)
    return row


def rows(cases: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Of each case, with samples of both kinds."""
    for case in cases:
        for samples in (MIXED, EVEN):
            yield measure(case, samples, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="CASE")
    given = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # so that the process's seconds are those of the work
    keep_freed_memory()  # as dhp's ranks do
    for row in rows(given.only, given.rounds):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
