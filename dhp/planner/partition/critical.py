"""How long a step of a pipeline takes by what one of its stages must do and wait for: exact enough to search by.

A step is no shorter than, for each stage: the time until its first micro-batch has come, the stage's own work, what it
waits for, and what is left to do before it when it is done. Between its first forward and its first backward a
micro-batch passes all later stages twice, and the stage has only so many other forwards to do meanwhile; between its
last forward and its last backward likewise; and as it holds only so many micro-batches, every so many of them wait for
the whole way there and back. Each follows from the programs, so that all of it is a lower bound where nothing is
assumed of other stages (`nothing_elsewhere`). With guesses of their recomputing and hand-overs it is an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dhp.planner.partition.problem import PartitionProblem
from dhp.planner.partition.simulate import Program
from dhp.planner.partition.tables import Tables
from dhp.planner.units import Numbers


@dataclass(frozen=True)
class Elsewhere:
    """What is assumed of other stages. before, behind: [runs], seconds that those before and behind recompute a
    micro-batch; hop_s: of a hand-over between two of them."""

    before: Numbers
    behind: Numbers
    hop_s: float


def nothing_elsewhere(problem: PartitionProblem, tables: Tables) -> Elsewhere:
    """What is certain: they may recompute nothing, and no hand-over is faster than the fastest."""
    none = np.zeros(problem.runs)
    return Elsewhere(none, none, float(tables.hop[1:-1].min(initial=np.inf)) if problem.runs > 2 else 0.0)


@dataclass(frozen=True)
class _Turns:
    """Of a program: forwards between its first and its first backward, backwards between its last forward and its last,
    whether the first backward comes before the last forward, and micro-batches that are held at most."""

    ahead: int
    left: int
    apart: bool
    held: int


def _turns(program: Program, held: int) -> _Turns:
    backs = [at for at, work in enumerate(program) if work.back]
    forwards = [at for at, work in enumerate(program) if not work.back]
    left = sum(at > forwards[-1] for at in backs[:-1])
    return _Turns(sum(at < backs[0] for at in forwards[1:]), left, backs[0] < forwards[-1], held)


def critical(problem: PartitionProblem, tables: Tables, elsewhere: Elsewhere) -> Numbers:
    """[runs, a, b]: seconds that a step takes at least where run k holds the units from a to b; inf where it must not.
    Of programs in which each stage has one run."""
    return np.stack([_of_stage(problem, tables, elsewhere, k) for k in range(problem.runs)])


def _of_stage(problem: PartitionProblem, tables: Tables, elsewhere: Elsewhere, k: int) -> Numbers:
    micro_batches, last = problem.micro_batches, problem.runs - 1
    fits = np.isfinite(tables.replay[k])
    forward, backward = tables.forward, tables.backward + np.where(fits, tables.replay[k], 0.0)
    hop, there, back = tables.hop, tables.forward[0], tables.backward[0]  # sums from the chain's beginning
    unknown = (k - 1) * elsewhere.hop_s if k else 0.0
    arrival = there + (hop + unknown if k else 0.0)
    every = problem.first_back == 0  # all stages before go back
    goes = problem.positions.at > problem.first_back
    leaving = back + np.where(goes, hop + (unknown if every else 0.0), 0.0) * (k > 0) + elsewhere.before[k]
    one_way = (hop + (last - 1 - k) * elsewhere.hop_s) * (k < last)
    work_behind = (there[-1] - there) + (back[-1] - back) + elsewhere.behind[k]
    around = np.where(k < last, work_behind + 2 * one_way, 0.0)[None, :]
    work, turns = forward + backward, _turns(problem.programs[k], problem.in_flight[k])
    first = np.maximum(0.0, around - turns.ahead * forward)
    final = np.maximum(0.0, around - turns.left * backward)
    waits = first + final if turns.apart else np.maximum(first, final)
    rounds = (micro_batches - 1) // turns.held + 1
    own = np.maximum(micro_batches * work + waits, rounds * (work + around))
    through = (arrival + leaving)[:, None] + own
    # A stage without backward only sends: its last micro-batch has the whole way still before it.
    ahead = arrival[:, None] + micro_batches * forward + (work_behind + one_way)[None, :]
    return np.where(fits, np.where(tables.back, through, ahead), np.inf)
