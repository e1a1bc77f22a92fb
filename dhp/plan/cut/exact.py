"""Finds the fastest cuts by simulated schedules, with proof."""

from dataclasses import dataclass
from itertools import combinations, product
from math import comb

import numpy as np

from dhp.core.errors import ConfigError
from dhp.plan.cut.problem import Partition, PartitionProblem
from dhp.plan.cut.run_tables import (
    Cuts,
    Path,
    Tables,
    all_cuts,
    below,
    choices_of,
    costs_of,
    least_largest,
    least_sum,
    limit_for,
    make_tables,
    needed_bytes,
    steps_of,
)
from dhp.plan.cut.simulate import Program
from dhp.plan.cut.units import Numbers


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


MOST_CUTS = 130_000  # that are simulated
_ROUNDS = 3  # of what stages recompute
_BLOCK = 2048
_EVEN = 1e-9  # differences of seconds that are rounding
_BEAM = 16  # paths of several runs a stage that are moved on from


def exact(problem: PartitionProblem, most: int = MOST_CUTS) -> Partition:
    """The fastest cuts, and what the units recompute under the budget. most: cuts that are simulated.

    Raises ConfigError where no cut fits the budget, or there are fewer units than runs."""
    tables = make_tables(problem)
    if problem.runs != problem.stages:
        path, step_s, tried = _interleaved(problem, tables, most)
        bound = step_s if _count(problem) <= most else _least_work(problem, tables)
    else:
        path, step_s, bound, tried = _in_turn(problem, tables, most)
    path = _evened(problem, tables, path, step_s)
    cuts = tuple(int(problem.positions.at[index]) for index in path)
    recompute = choices_of(problem, cuts) if np.isfinite(problem.budget_bytes) else ()
    return Partition(cuts, step_s, recompute, min(bound, step_s), tried)


def _in_turn(problem: PartitionProblem, tables: Tables, most: int) -> tuple[Path, float, float, int]:
    """Path, seconds, lower bound and cuts simulated, where each stage has one run."""
    bounds = critical(problem, tables, nothing_elsewhere(problem, tables))
    lowest, first = least_largest(bounds)
    if not np.isfinite(lowest):
        raise _nothing_fits(problem)
    best, step_s, tried = _improved(problem, tables, bounds, [first, *_guesses(problem, tables)])
    limit = limit_for(bounds, most, step_s)
    paths, largest = below(bounds, limit)
    for at in range(0, len(paths), _BLOCK):
        if largest[at] >= step_s:
            break
        steps = steps_of(problem, tables, paths[at : at + _BLOCK])
        tried += len(steps)
        if steps.min() < step_s:
            best, step_s = tuple(paths[at + int(steps.argmin())].tolist()), float(steps.min())
    if limit < step_s:  # some were left out
        best, step_s, more = _improved(problem, tables, bounds, [best])
        tried += more
    return best, step_s, limit, tried


def _guesses(problem: PartitionProblem, tables: Tables) -> list[Path]:
    """Paths with the least estimate, each by what the stages of the one before recompute."""
    hops = tables.hop[1:-1]
    none, hop_s = np.zeros(problem.runs), float(np.median(hops)) if len(hops) else 0.0
    elsewhere, found = Elsewhere(none, none, hop_s), []
    for _ in range(_ROUNDS):
        _, path = least_largest(critical(problem, tables, elsewhere))
        if path in found:
            break
        found.append(path)
        ends = [0, *path, len(tables.hop) - 1]
        replay = np.array([tables.replay[k, a, b] for k, (a, b) in enumerate(zip(ends, ends[1:]))])
        total = replay.cumsum()
        elsewhere = Elsewhere(total - replay, total[-1] - total, hop_s)
    return found


def _improved(
    problem: PartitionProblem, tables: Tables, bounds: Numbers, starts: list[Path]
) -> tuple[Path, float, int]:
    """The best of these paths after moves of single cuts and pairs of them: path, seconds, cuts simulated. Moves whose
    bound is no lower than the best are left out."""
    best, step_s, tried = starts[0], np.inf, 0
    for start in dict.fromkeys(starts):
        own, cuts = np.inf, np.array([start], dtype=np.int_)
        while len(cuts):
            steps = steps_of(problem, tables, cuts)
            tried += len(cuts)
            at = int(steps.argmin())
            if steps[at] >= own:
                break
            own, path = float(steps[at]), tuple(cuts[at].tolist())
            cuts = _moved(path, len(tables.hop) - 1)
            cuts = cuts[_bounds_of(bounds, cuts) < own]
        if own < step_s:
            best, step_s = path, own
    return best, step_s, tried


def _evened(problem: PartitionProblem, tables: Tables, path: Path, step_s: float) -> Path:
    """Of cuts as fast as these that moves lead to, one whose runs are most even: where one stage takes all the time,
    others may be cut anyhow, and even ones keep less memory and bear what was not foreseen."""
    spread = _spread(tables, np.array([path], dtype=np.int_))[0]
    while True:
        cuts = _moved(path, len(tables.hop) - 1)
        spreads = _spread(tables, cuts)
        better = spreads < spread * (1 - _EVEN)
        cuts, spreads = cuts[better], spreads[better]
        as_fast = steps_of(problem, tables, cuts) <= step_s * (1 + _EVEN) if len(cuts) else np.zeros(0, dtype=bool)
        if not as_fast.any():
            return path
        cuts, spreads = cuts[as_fast], spreads[as_fast]
        path, spread = tuple(cuts[int(spreads.argmin())].tolist()), spreads.min()


def _spread(tables: Tables, cuts: Cuts) -> Numbers:
    """Of each cut, the squares of its runs' seconds, added up; inf where it must not be."""
    costs = costs_of(tables, cuts)
    found: Numbers = ((costs.forward + costs.backward) ** 2).sum(axis=0)
    return found


def _moved(path: Path, last: int) -> Cuts:
    """The path with one cut moved by up to three positions, or two of them by one or two."""
    moves: list[dict[int, int]] = [{at: by} for at in range(len(path)) for by in (-3, -2, -1, 1, 2, 3)]
    pairs = product(combinations(range(len(path)), 2), (-2, -1, 1, 2), (-2, -1, 1, 2))
    moves += [{one: by, other: with_it} for (one, other), by, with_it in pairs]
    found = np.tile(np.array(path, dtype=np.int_), (len(moves), 1))
    for row, move in enumerate(moves):
        for at, by in move.items():
            found[row, at] += by
    ends = np.pad(found, ((0, 0), (1, 1)), constant_values=((0, 0), (0, last)))
    return found[(np.diff(ends, axis=1) > 0).all(axis=1)]


def _bounds_of(bounds: Numbers, cuts: Cuts) -> Numbers:
    ends = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, bounds.shape[1] - 1)))
    runs = np.arange(len(bounds))[None, :]
    found: Numbers = bounds[runs, ends[:, :-1], ends[:, 1:]].max(axis=1)
    return found


def _interleaved(problem: PartitionProblem, tables: Tables, most: int) -> tuple[Path, float, int]:
    """Path, seconds and cuts simulated, where stages have several runs: all of them, or the best that moves find."""
    if _count(problem) <= most:
        cuts = all_cuts(problem)
        steps = steps_of(problem, tables, cuts)
        if len(cuts) and np.isfinite(steps.min()):
            return tuple(cuts[int(steps.argmin())].tolist()), float(steps.min()), len(cuts)
        raise _nothing_fits(problem)
    work = tables.forward + tables.backward + tables.replay
    share = float(tables.forward[0, -1] + tables.backward[0, -1]) / problem.runs
    starts = [least_largest(work), least_sum(np.where(np.isfinite(work), (work - share) ** 2, np.inf))]
    if not np.isfinite(starts[0][0]):
        raise _nothing_fits(problem)
    return _beam(problem, tables, [path for _, path in starts], most)


def _beam(problem: PartitionProblem, tables: Tables, starts: list[Path], most: int) -> tuple[Path, float, int]:
    """The best of what moves of the best few paths lead to, until nothing new is among these or `most` were simulated:
    path, seconds, cuts simulated."""
    steps: dict[Path, float] = {}
    new, best = list(dict.fromkeys(starts)), list[Path]()
    while new and len(steps) < most + len(starts):
        found = steps_of(problem, tables, np.array(new, dtype=np.int_))
        steps |= dict(zip(new, found.tolist(), strict=True))
        before, best = best, sorted({*best, *new}, key=lambda path: steps[path])[:_BEAM]
        moved = (map(tuple, _moved(path, len(tables.hop) - 1).tolist()) for path in best if path not in before)
        new = [path for path in dict.fromkeys(path for paths in moved for path in paths) if path not in steps]
    return best[0], steps[best[0]], len(steps)


def _least_work(problem: PartitionProblem, tables: Tables) -> float:
    """No step is shorter than the work of all stages, shared out evenly."""
    return problem.micro_batches * float(tables.forward[0, -1] + tables.backward[0, -1]) / problem.stages


def _count(problem: PartitionProblem) -> int:
    return comb(len(problem.positions.at) - 2, problem.runs - 1)


def _nothing_fits(problem: PartitionProblem) -> ConfigError:
    places = len(problem.positions.at) - 2
    if places < problem.runs - 1:
        return ConfigError(
            f"{len(problem.units)} units cannot be cut into {problem.runs} runs: they have {places} places to cut. "
            f"Set text.pipeline × text.virtual_stages to {places + 1} or less"
        )
    if np.isinf(problem.budget_bytes) and problem.held is not None:
        held = problem.held
        return ConfigError(
            f"{len(problem.units)} units cannot be cut into {problem.runs} runs of which run {held.run} has "
            f"{problem.units[held.unit].name}: there are too few units before it or behind it. Set vision.pipeline or "
            "text.pipeline lower"
        )
    return ConfigError(
        f"no cut into {problem.stages} stages keeps within {problem.budget_bytes / 1e9:.2f} GB a device: with "
        f"everything recomputed the fullest stage takes {needed_bytes(problem) / 1e9:.2f} GB at least. Raise "
        "memory.budget_gib, lower training.micro_batch_size, or raise text.pipeline or text.tensor"
    )
