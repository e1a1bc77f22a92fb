"""Where a step's time went, rank by rank, and how each rank's time compares with its work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dhp.observe.events import SAVE
from dhp.observe.metrics import StepMetrics
from dhp.observe.ranks import COMM, RankLine
from dhp.report.record import Record

WARM_UP = 2  # steps that do not count: kernels are made ready, and caches filled
DATA, FORWARD, BACKWARD, COLLECTIVE = "data", "forward", "backward", "collective"
WAITING, OPTIMIZER, CHECKPOINT = "waiting for others", "optimizer", "checkpoint"
KINDS = (DATA, FORWARD, BACKWARD, COLLECTIVE, WAITING, OPTIMIZER, CHECKPOINT)


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a stage's ranks, [steps, ranks], in some of the steps. own: in which a rank computed; comm: in
    collectives, waiting for its stage's other ranks among it. apart: the two are measured apart; else, as on GPUs, own
    has both and comm is 0. work: relative to the stage's mean rank; None where it is not known."""

    steps: Sequence[int]
    own: np.ndarray
    comm: np.ndarray
    work: np.ndarray | None
    apart: bool

    @property
    def busy_s(self) -> float:
        """Seconds of a step in which the stage was at work, in the mean."""
        return float((self.own + self.comm).max(axis=1).mean())

    @property
    def exchange_s(self) -> float:
        """Seconds of a step that collectives take themselves: of the rank that waits least for the others in them."""
        return float(self.comm.min(axis=1).mean())

    @property
    def pace(self) -> np.ndarray:
        """[steps, ranks]: seconds over work, relative to the median of the stage's ranks in that step; NaN where a rank
        had no work."""
        work = np.ones_like(self.own) if self.work is None else self.work
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.where(work > 0, self.own / work, np.nan)
            middle = np.array([np.nanmedian(row) if np.isfinite(row).any() else np.nan for row in each])
            return each / middle[:, None]


@dataclass(frozen=True)
class Times:
    """Of the steps that count. step_s, data_s: of each of them. save_s: seconds in which training waited for
    checkpoints, in all. stages: those of which ranks are known."""

    lines: Sequence[RankLine]
    steps: Sequence[StepMetrics]
    step_s: np.ndarray
    data_s: np.ndarray
    save_s: float
    stages: Mapping[str, StageTimes]

    @property
    def mean_s(self) -> float:
        """Of a step, with its share of the checkpoints."""
        return float(self.step_s.mean()) + self.save_s / len(self.step_s)


def times_of(record: Record) -> Times | None:
    """Times of the steps behind the first `WARM_UP` of each attempt; None where none is known."""
    warm = {step + 1 + n for step in _begins(record) for n in range(WARM_UP)}
    timed = [one for one in record.steps if one.step_s is not None]
    steps = [one for one in timed if one.step not in warm] or timed
    if not steps:
        return None
    known = {one.step for one in steps}
    lines = [line for line in record.ranks if line.step in known]
    # Of the newest attempt's, and but for the last step's: a checkpoint at the end is one in a run, however long.
    waits = {one.step: one.seconds or 0.0 for one in record.events if one.event == SAVE and one.step in known}
    saved = sum(seconds for step, seconds in waits.items() if step != record.steps[-1].step)
    step_s, data_s = (np.array([getattr(one, name) or 0.0 for one in steps]) for name in ("step_s", "data_s"))
    return Times(lines, steps, step_s, data_s, saved, _stages(lines))


def _begins(record: Record) -> list[int]:
    return [0, *(one.step for one in record.events if one.event == "start")]


def _stages(lines: Sequence[RankLine]) -> dict[str, StageTimes]:
    found: dict[str, StageTimes] = {}
    if not lines:
        return found
    for name in lines[-1].seconds:
        ranks = len(next(iter(lines[-1].seconds[name].values()), ()))
        of = [line for line in lines if _is_of(line.seconds.get(name, {}), ranks)]  # in the last attempt's layout
        if not ranks or not of:
            continue
        own = np.array([
            np.sum([value for kind, value in line.seconds[name].items() if kind != COMM], axis=0) for line in of
        ])  # fmt: skip
        comm = np.array([line.seconds[name].get(COMM, [0.0] * ranks) for line in of])
        work = [line.work.get(name) for line in of]
        known = None if any(one is None or len(one) != ranks for one in work) else np.array(work, dtype=float)
        apart = all(COMM in line.seconds[name] for line in of)
        found[name] = StageTimes([line.step for line in of], own, comm, known, apart)
    return found


def _is_of(seconds: Mapping[str, Sequence[float]], ranks: int) -> bool:
    """Whether something that so many ranks did was measured."""
    return set(seconds) - {COMM} != set() and all(len(of) == ranks for of in seconds.values())


def split_by_rank(times: Times) -> dict[str, dict[str, float]]:
    """Seconds of a mean step by rank and kind (`KINDS`), which add up to the step; what is left is waiting."""
    found: dict[str, dict[str, float]] = {}
    step_s, data_s = float(times.step_s.mean()), float(times.data_s.mean())
    for name in times.stages:
        known = set(times.stages[name].steps)
        lines = [line.seconds[name] for line in times.lines if line.step in known]
        for rank in range(times.stages[name].own.shape[1]):
            spent = {kind: float(np.mean([of.get(kind, [0.0] * (rank + 1))[rank] for of in lines])) for kind in _RANKS}
            own = {_RANKS[kind]: seconds for kind, seconds in spent.items()}
            waiting = max(0.0, step_s - data_s - sum(own.values()))
            row = {DATA: data_s, **own, WAITING: waiting, CHECKPOINT: times.save_s / len(times.step_s)}
            found[f"{name} rank {rank}"] = {kind: row[kind] for kind in KINDS}
    return found


_RANKS = {"forward": FORWARD, "backward": BACKWARD, COMM: COLLECTIVE, "optimizer": OPTIMIZER}  # of RankLine → of KINDS


def pace_rows(times: Times) -> tuple[list[str], list[int], np.ndarray]:
    """Names of all ranks, the steps, and each rank's seconds over its work relative to its stage's median, [ranks,
    steps]."""
    names, rows, steps = [], [], [line.step for line in times.lines]
    at = {step: number for number, step in enumerate(steps)}
    for name, stage in times.stages.items():
        pace = np.full((len(steps), stage.own.shape[1]), np.nan)
        pace[[at[step] for step in stage.steps]] = stage.pace
        names += [f"{name} rank {rank}" for rank in range(pace.shape[1])]
        rows.append(pace.T)
    return names, steps, np.concatenate(rows) if rows else np.zeros((0, len(steps)))
