"""One run that meets fault after fault, each a while after an attempt's first new checkpoint."""

from __future__ import annotations

import random
import re
import signal
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from experiments.chaos.faults import ACTORS
from experiments.chaos.formula import Times, of_1024_gpus
from experiments.chaos.judge import read_lines
from experiments.chaos.laboratory import Laboratory
from experiments.chaos.points import FRESH
from experiments.chaos.run import LIMIT_S, Observed, Watch
from experiments.chaos.scenarios import Lengths

SAVE_STEPS = 10
OF_ONE_FAULT = ("lost_steps", "detect_s", "rebuild_s", "first_step_s", "message")  # of a row about one fault


@dataclass
class Rate:
    """Kills an actor `after_s` behind the first checkpoint of each attempt, so many times. struck: when each was;
    resumed: when the attempt behind it had its first step."""

    after_s: float
    faults: int
    seed: int
    struck: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._due: float | None = None
        self._known = 0

    def __call__(self, watch: Watch) -> Mapping[str, Any] | None:
        """As `experiments.chaos.run.Strike`."""
        if self.struck and watch.first_step is None:
            return None  # no attempt trains
        if len(self.resumed) < len(self.struck):
            assert watch.first_step is not None
            self.resumed.append(watch.first_step)
        if len(self.struck) == self.faults:
            return None
        newest = watch.newest_checkpoint()
        if self._due is None and newest > self._known:
            self._due = time.time() + self.after_s
        if self._due is None or time.time() < self._due:
            return None
        for process in watch.processes().get(self._random.choice(ACTORS), ()):
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
                self._due, self._known = None, watch.newest_checkpoint()
                self.struck.append(time.time())
                return {"at": self.struck[-1], "process": "an actor", "pid": process.pid}
        return None


def run_at_rate(laboratory: Laboratory, after_s: float, faults: int, seed: int) -> dict[str, Any]:
    """A row: the share of its time in which the run trained what stayed, as measured and by the formula."""
    about = _step_s(laboratory.reference(FRESH))
    steps = SAVE_STEPS * max(2, round((after_s + SAVE_STEPS * about) * (faults + 1) / about / SAVE_STEPS))
    lengths = Lengths(steps, SAVE_STEPS)
    step_s = _step_s(laboratory.reference(FRESH, lengths))
    rate = Rate(after_s, faults, seed)
    limit_s = LIMIT_S + faults * (after_s + 120) + steps * step_s * 3
    took: dict[int, float] = {}
    observed, judged = laboratory.run(
        FRESH,
        lengths=lengths,
        look=lambda run_dir: took.update(_took(run_dir)),
        strike=rate,
        names_rank=False,
        limit_s=limit_s,
    )
    times = _times(observed, rate, step_s, took)
    # From the first fault on until the last attempt began to train: whole periods, each with its fault.
    whole = rate.resumed[-1] - rate.struck[0] if len(rate.resumed) > 1 else 0.0
    last = len(rate.struck) - 1  # behind it is the verdict on the attempt that completed
    stayed = (_step_at(observed, last) - _step_at(observed, 0)) * step_s
    return {
        "faults": len(rate.struck),
        "steps": steps,
        "effective_time": round(stayed / whole, 4) if whole else None,
        "by_formula": round(times.effective(), 4),
        "times": {key: round(value, 3) for key, value in asdict(times).items()},
        "gpus_1024": round(of_1024_gpus(times).effective(), 4),
        "wall_s": round(observed.wall_s, 1),
        "seed": seed,
    } | {key: value for key, value in judged.row().items() if key not in OF_ONE_FAULT}


def _step_at(observed: Observed, number: int) -> int:
    """The step that the attempt behind a fault began from."""
    return int(str(observed.faults[number]["followed_by"]).rpartition("step_")[2])


def _times(observed: Observed, rate: Rate, step_s: float, took: Mapping[int, float]) -> Times:
    """Means over the faults; of the first one it is not known when its attempt began to train."""
    known = [float(verdict["at"]) for verdict in observed.faults[: len(rate.struck)]]
    between = [struck - resumed for struck, resumed in zip(rate.struck[1:], rate.resumed)]
    detect = [at - struck for at, struck in zip(known, rate.struck)]
    stop = [stopped - at for stopped, at in zip(observed.stopped, known)]
    start = [resumed - step_s - stopped for resumed, stopped in zip(rate.resumed, observed.stopped)]
    stalls = [float(found) for found in re.findall(r"training waited ([\d.]+) s", observed.output)]
    mean = lambda values: statistics.fmean(values) if values else 0.0
    written = [float(found) for found in re.findall(r"is saved: ([\d.]+) s", observed.output)]
    warm = [_warm(took, _step_at(observed, number) + 1, step_s) for number in range(len(rate.struck))]
    seconds = (mean(between) + step_s, step_s, SAVE_STEPS, mean(stalls), mean(detect), mean(stop), mean(start))
    return Times(*seconds, mean(warm), mean(written))


def _warm(took: Mapping[int, float], first: int, step_s: float) -> float:
    """What the first steps of an attempt took longer than steps do, seconds. first: of them."""
    return sum(took[step] - step_s for step in range(first, first + SAVE_STEPS) if step in took)


def _took(run_dir: Path) -> dict[int, float]:
    """Seconds of each step."""
    return {step: float(line["step_s"]) for (kind, step), line in read_lines(run_dir).items() if kind == "train"}


def _step_s(observed: Observed) -> float:
    """Mean of a run's steps behind the first two, saves left out, as metrics.jsonl has them."""
    return statistics.fmean(seconds for step, seconds in _took(observed.run_dir).items() if step > 2)
