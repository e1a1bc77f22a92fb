"""`python -m experiments.bound`: does a report name what bounds a run, and is the gain that it expects the true one?

Each case is two runs: one bound by one thing, and the same with that changed. JSON lines: {case, kind, named, expected,
gained, ratio, sentence, step_s, changed_step_s, load, command}. expected: the share of a step that the report said
would go; gained: the share that went.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dhp.report.bound import HEALTHY, Times, find_causes, sentence, times_of
from dhp.report.run_record import RunRecord, read_run
from experiments.bound.cases import Case, Slowed, cases

ROOT = Path(__file__).parents[2]
INJECT = Path(__file__).parent / "inject"
STEPS = 32


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases, print a row each, and a sentence about all."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bound")
    parser.add_argument("cases", nargs="*", help="names of cases; all by default")
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args(arguments)
    command = " ".join(["python -m experiments.bound", *given.cases])
    command += "" if given.steps == STEPS else f" --steps {given.steps}"
    rows = []
    with tempfile.TemporaryDirectory(prefix="dhp-bound-") as folder:
        for case in cases(Path(folder)):
            if not given.cases or case.name in given.cases:
                rows.append(compare(case, Path(folder), given.steps) | {"command": command})
                print(json.dumps(rows[-1]), flush=True)
    named = sum(row["named"] == row["kind"] for row in rows)
    near = [row for row in rows if row["ratio"] is not None and 1 / 1.5 <= row["ratio"] <= 1.5]
    asked = [row for row in rows if row["kind"]]
    print(f"{named} of {len(rows)} runs are named rightly, the gain of {len(near)} of {len(asked)} within 1.5 times")


def compare(case: Case, folder: Path, steps: int) -> dict[str, Any]:
    """The row of a case."""
    record, times = train(folder, f"{case.name}-bound", steps, case.bound, case.slowed)
    causes = find_causes(record, times)
    first = causes[0] if causes and causes[0].share >= HEALTHY else None
    row: dict[str, Any] = {
        "case": case.name,
        "kind": case.kind,
        "named": "" if first is None else first.kind,
        "expected": None,
        "gained": None,
        "ratio": None,
        "sentence": sentence(record, times),
        "step_s": round(times.mean_s, 4),
        "load": round(os.getloadavg()[0], 1),
    }
    if case.kind:
        _, changed = train(folder, f"{case.name}-changed", steps, case.changed, None)
        expected = next((cause.share for cause in causes if cause.kind == case.kind), 0.0)
        gained = 1 - changed.mean_s / times.mean_s
        row |= {"expected": round(expected, 4), "gained": round(gained, 4), "changed_step_s": round(changed.mean_s, 4)}
        row["ratio"] = round(expected / gained, 3) if gained > 0 else None
    return row


def train(
    folder: Path, name: str, steps: int, overrides: Sequence[str], slowed: Slowed | None
) -> tuple[RunRecord, Times]:
    """A run of the tiny model; its record. Raises RuntimeError for a run that fails."""
    run_dir = folder / name.replace(" ", "-")
    settings = [f"run_dir={run_dir}", f"tiny_assets={folder / 'assets'}", f"training.max_steps={steps}"]
    settings += ["training.save_final=false", "cluster.threads_per_actor=1", "data.prefetch=1", *overrides]
    own = {} if slowed is None else {"DHP_SLOWED": json.dumps(asdict(slowed))}
    done = subprocess.run(
        [sys.executable, "-m", "dhp.train_ray", "--config-name=tiny", *settings],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{INJECT}:{ROOT}", **own},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {(done.stdout + done.stderr)[-2000:]}")
    record = read_run(run_dir)
    times = times_of(record)
    assert times is not None
    return record, times


if __name__ == "__main__":
    main()
