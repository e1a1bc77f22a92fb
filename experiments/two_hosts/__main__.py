"""`python -m experiments.two_hosts [--rounds N]`: attention over two hosts with slow links between them, by layout."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from experiments.two_hosts import network
from experiments.two_hosts.rank import BACKWARD, FORWARD, Case

MBIT = 16.0  # so slow that computing, four processes on two cores, hardly counts
HEADS, DIM, TOKENS = 32, 128, 512
BOTH = "both"
FEW_HEADS = 2  # on four ranks
INSIDE = "--inside"
RANK_MODULE = "experiments.two_hosts.rank"


def cases() -> list[Case]:
    """Each layout with as many key/value heads as query heads, and with a quarter of them."""
    layouts = {"ring": (4, 1, False), "ulysses": (1, 4, False), "2d": (2, 2, False), "2d_gather": (2, 2, True)}
    return [
        Case(name, ring, ulysses, HEADS, HEADS // share, TOKENS, DIM, gather)
        for share in (1, 4)
        for name, (ring, ulysses, gather) in layouts.items()
    ]


def few_heads() -> list[Case]:
    """Fewer heads than ranks: a longer sequence, so that it is the links that take the time."""
    layouts = {"ulysses": (1, 4), "2d": (2, 2)}
    return [Case(name, *mesh, FEW_HEADS, FEW_HEADS, 4 * TOKENS, DIM) for name, mesh in layouts.items()]


def run_ranks(given: Sequence[Case], rounds: int) -> list[list[list[dict[str, Any]]]]:
    """Results by rank, round and case."""
    arguments = [str(rounds), json.dumps([asdict(case) for case in given])]
    environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*f"ip netns exec rank{rank}".split(), sys.executable, "-m", RANK_MODULE, str(rank), *arguments],
            stdout=subprocess.PIPE, env=environment, text=True,
        )
        for rank in range(network.RANKS)
    ]  # fmt: skip
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("two_hosts: a rank failed; what it said is above")
    return json.loads(said[0])


def summarize(of_ranks: list[list[list[dict[str, Any]]]], number: int, direction: str) -> dict[str, float]:
    """Of one case, medians over rounds of the slowest rank's seconds and the busiest link's bytes; bytes counted."""
    by_round = [[of_rank[r][number][direction] for of_rank in of_ranks] for r in range(len(of_ranks[0]))]
    counted = {of_rank["sent"] for of_round in by_round for of_rank in of_round}
    if len(counted) != 1:
        raise AssertionError(f"ranks of case {number} sent {sorted(counted)} bytes; shards are even")
    return {
        "counted_bytes": counted.pop(),
        "bytes_over_link": median(max(found["over_link"] for found in of_round) for of_round in by_round),
        "seconds": median(max(found["seconds"] for found in of_round) for of_round in by_round),
    }


def rows(given: Sequence[Case], free: list, limited: list) -> Iterator[dict[str, Any]]:
    """A row for each case and direction. free, limited: results without and with the limit."""
    for number, case in enumerate(given):
        about = {"layout": case.layout, "kv_ratio": case.kv_ratio, "heads": case.heads}
        refused = limited[0][0][number].get("refused")
        if refused is not None:
            yield about | {"refused": refused}
            continue
        both = [_row(case, d, summarize(free, number, d), summarize(limited, number, d)) for d in (FORWARD, BACKWARD)]
        total = {key: sum(row[key] for row in both) for key in both[0]}
        for direction, row in zip((FORWARD, BACKWARD, BOTH), (*both, total), strict=True):
            ratio = {"ratio": row["measured_s"] / row["expected_s"]}
            yield {**about, "direction": direction, **row, **ratio}


def _row(case: Case, direction: str, free: dict[str, float], limited: dict[str, float]) -> dict[str, float]:
    over_link = case.bytes_over_link(direction)
    return {
        "counted_bytes": limited["counted_bytes"], "formula_bytes": round(case.bytes_sent(direction)),
        "link_formula_bytes": round(over_link), "bytes_over_link": limited["bytes_over_link"],
        "unlimited_s": free["seconds"], "expected_s": over_link * 8 / (MBIT * 1e6), "measured_s": limited["seconds"],
    }  # fmt: skip


def compare(found: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """How many times as long the other layouts take as 2D."""
    for share in (1.0, 0.25):
        for direction in (FORWARD, BACKWARD, BOTH):
            wanted = (HEADS, share, direction)
            of = {r["layout"]: r for r in found if (r["heads"], r["kv_ratio"], r.get("direction")) == wanted}
            ratios = {f"{name}_over_2d": row["measured_s"] / of["2d"]["measured_s"] for name, row in of.items()}
            yield {"kv_ratio": share, "direction": direction, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    try:
        network.require()
        if not given.inside:
            network.become_private(["experiments.two_hosts", "--rounds", str(given.rounds), INSIDE])
        network.build()
        work = cases() + few_heads()
        free = run_ranks(work, 3)
        network.limit(MBIT)
    except network.Unavailable as reason:
        print(f"two_hosts: skipped: {reason}", file=sys.stderr)
        return
    found = list(rows(work, free, run_ranks(work, given.rounds)))
    for row in (*found, *compare(found)):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
