"""`python -m experiments.chaos --points`: what a run keeps of itself when its processes are killed. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dhp.supervise.driver import adopt_orphans
from experiments.chaos.laboratory import FULL, KILL, Laboratory, cut_and_mend, draw, harm, strike, two_nodes
from experiments.chaos.points import LONG, lengths_of, points
from experiments.chaos.run import Judged, Observed
from experiments.commands import command_of

Row = dict[str, Any]
_SECONDS = ("detect_s", "rebuild_s", "first_step_s")


def strike_points(laboratory: Laboratory, name: str) -> Iterator[Row]:
    """A row for each point whose name begins so."""
    for point in points():
        if point.name.startswith(name):
            about: Row = {"point": point.name, "process": point.kind, "scenario": point.scenario}
            yield about | _row(*laboratory.run(point.scenario, point.environment))


def strike_at_random(laboratory: Laboratory, count: int, seed: int, only: str) -> Iterator[Row]:
    """A row for each of so many faults that a seed draws. only: a kind or a process, or of all."""
    for fault in draw(seed, count, lengths_of(LONG).steps):
        if only not in ("", fault.kind, fault.target):
            continue
        found = laboratory.run(
            LONG, lambda fired, of=fault: of.environment or {}, names_rank=fault.names_rank,
            small_disk=fault.kind == FULL, strike=strike(fault), between=partial(harm, fault),
        )  # fmt: skip
        about: Row = {"fault": fault.kind, "process": fault.target, "after_steps": fault.after_steps, "seed": seed}
        yield about | _row(*found)


def cut_link(laboratory: Laboratory) -> Iterator[Row]:
    """A row for a link between two nodes that is cut for a while, as root."""
    after = lengths_of(LONG).steps // 3
    laboratory.reference(LONG)  # before there is a cluster that would be a leftover of it
    with two_nodes() as nodes:
        more = [f"cluster.address={nodes.address}", "cluster.collocate=false", "cluster.collective_timeout_s=10"]
        found = laboratory.run(
            LONG, lambda fired: nodes.environment, names_rank=False, more=more, strike=cut_and_mend(nodes, after),
            apart=nodes.pids,
        )  # fmt: skip
    yield {"fault": "partition", "process": "the link", "after_steps": after} | _row(*found)


def summary(rows: Sequence[Row], command: str) -> Row:
    """All faults of a command in one row; seconds as [median, largest], of those that were killed."""
    killed = [row for row in rows if row.get("fault", KILL) == KILL]
    found: Row = {
        "runs": len(rows), "completed": sum(row["completed"] for row in rows),
        "identical": sum(row["identical"] for row in rows), "samples_lost": sum(row["samples_lost"] for row in rows),
        "samples_repeated": sum(row["samples_repeated"] for row in rows),
        "lost_steps": max((row["lost_steps"] or 0 for row in rows), default=0),
        "problems": sum(bool(row["problems"]) for row in rows),
    }  # fmt: skip
    for key in _SECONDS:
        known = [row[key] for row in killed if row[key] is not None]
        found[key] = [round(statistics.median(known), 2), max(known)] if known else None
    load = [round(value, 1) for value in os.getloadavg()]
    return found | {"cores": os.cpu_count(), "load": load, "command": command}


def _row(observed: Observed, judged: Judged) -> Row:
    about: Row = {"commands": observed.commands, "attempts": len(observed.faults) or 1}
    return about | {"wall_s": round(observed.wall_s, 1)} | judged.row()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.chaos")
    parser.add_argument("--points", nargs="?", const="", metavar="NAME", help="every named point, or those of a name")
    parser.add_argument("--runs", type=int, metavar="N", help="so many faults from outside, drawn by --seed")
    parser.add_argument("--only", default="", metavar="KIND", help="of --runs, those of a kind or process")
    parser.add_argument("--partition", action="store_true", help="the link between two nodes is cut for a while")
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--folder", type=Path, help="where runs are made; a temporary folder by default")
    parser.add_argument("--keep", action="store_true", help="keep the directories of runs with problems")
    given = parser.parse_args(arguments)
    adopt_orphans()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="dhp-chaos-", dir="/tmp"))
    laboratory, rows = Laboratory(folder, given.keep), []
    command = command_of("chaos", arguments)
    faults = strike_points(laboratory, given.points or "")
    if given.partition:
        faults = cut_link(laboratory)
    elif given.runs is not None:
        faults = strike_at_random(laboratory, given.runs, given.seed, given.only)
    for row in faults:
        rows.append(row | {"command": command})
        print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(summary(rows, command)), flush=True)
    if not given.folder and not given.keep:
        shutil.rmtree(folder)
    return int(any(row["problems"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
