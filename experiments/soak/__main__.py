"""`python -m experiments.soak --steps 2000`: how the processes of a run grow while it trains.

A run of the tiny model with two actors a part and one data worker, started as a user starts it; its processes are
looked at from outside. JSON lines, one for each kind of process: {process, count, steps, warm_steps, warm_mib, end_mib,
growth_bytes_a_step,
floor_bytes_a_step, command}.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from experiments.soak.growth import Sample, growth, kind_of

LOOK_S = 2.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, watch, print."""
    parser = argparse.ArgumentParser(prog="python -m experiments.soak")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warm-steps", type=int, help="first steps that do not count; half of them by default")
    parser.add_argument("overrides", nargs="*", help="of the run's configuration")
    given = parser.parse_intermixed_args(arguments)
    warm = given.steps // 2 if given.warm_steps is None else given.warm_steps
    with tempfile.TemporaryDirectory(prefix="dhp-soak-") as folder:
        samples = list(watch(Path(folder), given.steps, given.overrides))
    command = f"python -m experiments.soak --steps {given.steps}" + "".join(f" {one}" for one in given.overrides)
    for row in growth(samples, warm):
        print(json.dumps(row | {"command": command}), flush=True)


def watch(folder: Path, steps: int, overrides: Sequence[str]) -> Iterator[Sample]:
    """Train so many steps; the resident memory of every process of the run, again and again. Raises RuntimeError for a
    run that fails."""
    run_dir = folder / "run"
    settings = [f"run_dir={run_dir}", f"training.max_steps={steps}", "training.log_interval=100"]
    settings += ["data.num_workers=1", "training.save_final=false", "cluster.threads_per_actor=1"]
    command = [sys.executable, "-m", "dhp.train_ray", "--config-name=tiny", *settings, *overrides]
    with (folder / "log").open("w") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while run.poll() is None:
                yield from look(run.pid, steps_of(run_dir))
                time.sleep(LOOK_S)
        finally:
            run.terminate()
            run.wait()
    if run.returncode:
        raise RuntimeError((folder / "log").read_text()[-2000:])


def steps_of(run_dir: Path) -> int:
    """Steps that the run has written so far."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def look(pid: int, step: int) -> Iterator[Sample]:
    """Every process of the run, the driver first."""
    try:
        driver = psutil.Process(pid)
        found = [driver, *driver.children(recursive=True)]
    except psutil.Error:
        return
    for process in found:
        try:
            line = process.cmdline()
            # What is the process's own: pages of the object store are shared, and come and go with the data in it.
            about = process.memory_full_info()
            yield Sample(process.pid, "driver" if process.pid == pid else kind_of(line), step, about.uss)
        except psutil.Error:  # it has ended
            continue


if __name__ == "__main__":
    main()
