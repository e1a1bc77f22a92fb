"""Runs of a scenario that meet a fault, each beside the undisturbed one."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from experiments.chaos.judge import Judged, judge
from experiments.chaos.run import LIMIT_S, Observed, train
from experiments.chaos.scenarios import Lengths, lengths_of, prepare, reference_of, settings

BATCH = 8  # samples of a step
SUPERVISED = ("training.max_restarts=8", "training.restart_wait_s=0")


class Laboratory:
    """A folder with assets and the undisturbed runs, each made when it is first asked for."""

    def __init__(self, folder: Path, keep: bool = False):
        """keep: directories of runs with problems stay."""
        self.folder, self._keep, self._number = folder, keep, 0
        self._references: dict[tuple[str, Lengths], Observed] = {}

    def reference(self, scenario: str, lengths: Lengths | None = None) -> Observed:
        """The undisturbed run of a scenario. Raises RuntimeError where it fails."""
        key = reference_of(scenario), lengths or lengths_of(scenario)
        if key not in self._references:
            run_dir = self.folder / f"reference-{len(self._references)}"
            arguments = settings(key[0], self.folder / "assets", run_dir, lengths=key[1])
            with self._scratch() as scratch:
                observed = train(arguments, run_dir, scratch, limit_s=LIMIT_S + key[1].steps)
            if observed.code:
                raise RuntimeError(f"the undisturbed run failed: {observed.output[-3000:]}")
            self._references[key] = observed
        return self._references[key]

    def run(
        self,
        scenario: str,
        environment: Callable[[Path], Mapping[str, str]] = lambda fired: {},
        names_rank: bool = True,
        small_disk: bool = False,
        lengths: Lengths | None = None,
        more: Sequence[str] = (),
        **watched: Any,
    ) -> tuple[Observed, Judged]:
        """A supervised run of a scenario that meets a fault, and what is to be said of it. environment: of the file in
        which the fault says that it has come. more: arguments of the run. small_disk: checkpoints have one of their own
        (as root)."""
        reference = self.reference(scenario, lengths).run_dir
        self._number += 1
        run_dir = self.folder / f"run-{self._number}"
        with own_disk(run_dir / "checkpoints") if small_disk else nullcontext():
            begins = prepare(scenario, reference, run_dir)
            arguments = settings(scenario, self.folder / "assets", run_dir, [*SUPERVISED, *begins, *more], lengths)
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


@contextmanager
def own_disk(folder: Path, size: str = "256m") -> Iterator[None]:
    """A small file system at `folder`. Raises CalledProcessError where this process may not mount one."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "dhp-chaos", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
