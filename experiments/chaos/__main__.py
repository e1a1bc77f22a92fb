"""`python -m experiments.chaos --points`: what a run keeps of itself when its processes are killed. See README.md."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dhp.supervise.driver import adopt_orphans
from experiments.chaos.judge import Judged, judge
from experiments.chaos.points import Point, points
from experiments.chaos.run import Observed, train
from experiments.chaos.scenarios import prepare, reference_of, settings

BATCH = 8  # samples of a step
SUPERVISED = ("training.max_restarts=3", "training.restart_wait_s=0")


class Laboratory:
    """A folder with assets and the undisturbed runs, each made when it is first asked for."""

    def __init__(self, folder: Path, keep: bool = False):
        """keep: directories of runs with problems stay."""
        self.folder, self._keep, self._number = folder, keep, 0

    def reference(self, scenario: str) -> Observed:
        """The undisturbed run of a scenario. Raises RuntimeError where it fails."""
        of = reference_of(scenario)
        run_dir = self.folder / f"reference-{of}"
        if not hasattr(self, f"_{of}"):
            with self._scratch() as scratch:
                observed = train(settings(of, self.folder / "assets", run_dir), run_dir, scratch)
            if observed.code:
                raise RuntimeError(f"the undisturbed run failed: {observed.output[-3000:]}")
            setattr(self, f"_{of}", observed)
        found: Observed = getattr(self, f"_{of}")
        return found

    def run(
        self,
        scenario: str,
        environment: Callable[[Path], Mapping[str, str]] = lambda fired: {},
        more: Sequence[str] = (),
        **watched: Any,
    ) -> tuple[Observed, Judged]:
        """A supervised run of a scenario that meets a fault, and what is to be said of it. environment: of the file in
        which the fault says that it has come."""
        reference = self.reference(scenario).run_dir
        self._number += 1
        run_dir = self.folder / f"run-{self._number}"
        begins = prepare(scenario, reference, run_dir)
        arguments = settings(scenario, self.folder / "assets", run_dir, [*SUPERVISED, *begins, *more])
        names_rank = watched.pop("names_rank", True)
        with self._scratch() as scratch:
            observed = train(arguments, run_dir, scratch, environment(scratch / "fired"), **watched)
        judged = judge(observed, reference, BATCH, names_rank)
        if not (self._keep and judged.problems):
            shutil.rmtree(run_dir)
        return observed, judged

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="dhp-c-", dir="/tmp") as folder:
            yield Path(folder)


def strike_points(laboratory: Laboratory, chosen: Sequence[Point]) -> Iterator[dict[str, Any]]:
    """A row for each point."""
    for point in chosen:
        observed, judged = laboratory.run(point.scenario, point.environment)
        yield {
            "point": point.name,
            "process": point.kind,
            "scenario": point.scenario,
            "commands": observed.commands,
            "attempts": len(observed.faults) or 1,
            "wall_s": round(observed.wall_s, 1),
        } | judged.row()


def main(arguments: Sequence[str] | None = None) -> int:
    """Strike, judge, print; the number of faults with problems, 1 at most."""
    parser = argparse.ArgumentParser(prog="python -m experiments.chaos")
    parser.add_argument("--points", nargs="?", const="", metavar="NAME", help="every named point, or those of a name")
    parser.add_argument("--folder", type=Path, help="where runs are made; a temporary folder by default")
    parser.add_argument("--keep", action="store_true", help="keep the directories of runs with problems")
    given = parser.parse_args(arguments)
    adopt_orphans()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="dhp-chaos-", dir="/tmp"))
    laboratory, problems = Laboratory(folder, given.keep), 0
    chosen = [point for point in points() if not given.points or point.name.startswith(given.points)]
    begun = time.time()
    for row in strike_points(laboratory, chosen):
        problems += bool(row["problems"])
        print(json.dumps(row), flush=True)
    print(f"{len(chosen)} faults in {time.time() - begun:.0f} s, {problems} with problems", file=sys.stderr)
    if not given.folder and not given.keep:
        shutil.rmtree(folder)
    return min(1, problems)


if __name__ == "__main__":
    raise SystemExit(main())
