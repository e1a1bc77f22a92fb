"""What is recorded of a step that has ended: its numbers, what each rank did, its bad samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dhp.core.batch import StepInfo
from dhp.core.reports import StageReport
from dhp.core.text import one_line
from dhp.observe.events import SKIPPED
from dhp.observe.metrics import StepMetrics
from dhp.observe.planned import Planned
from dhp.observe.ranks import rank_line
from dhp.observe.recorder import Recorder
from dhp.observe.stragglers import Pace, RankShare, pace
from dhp.report.page import FILE, write_report
from dhp.step.stages import Stages
from dhp.trainer.sample_losses import mean_losses

MOST_STEPS = 20_000  # of which a page is made at the end of a run: of more, reading them would hold it up
MOST_BYTES = 2**28  # of what it is made of
SKIPPED_SHOWN = 20  # messages of skipped samples in one step


def record_step(
    recorder: Recorder,
    metrics: StepMetrics,
    info: StepInfo,
    reports: Mapping[str, Sequence[StageReport]],
    stages: Stages,
) -> None:
    """Record a step that has ended: its numbers, its ranks, its bad samples."""
    for line in left_out(info):
        recorder.say(line)
    recorder.record(metrics)
    losses = mean_losses(info, reports, stages)
    recorder.record_ranks(rank_line(metrics.step, reports, _work(info, reports, stages), info.rows, losses))
    for message in info.skipped[:SKIPPED_SHOWN]:
        recorder.note(SKIPPED, metrics.step, text=message)
    recorder.compare_ranks(rank_shares(info, reports, stages))


def write_page(run_dir: Path) -> str | None:
    """Write the report on a run that ends: where it is, or why there is none; None for a run of very many steps. A run
    never fails of it."""
    with suppress(OSError):
        sizes = sum((run_dir / name).stat().st_size for name in ("metrics.jsonl", "ranks.jsonl"))
        with (run_dir / "metrics.jsonl").open("rb") as file:
            if sizes > MOST_BYTES or sum(1 for _ in file) > MOST_STEPS:
                return None
    try:
        return str(write_report([run_dir], run_dir / FILE))
    except Exception as error:  # whatever drawing meets, what was trained is whole
        return f"none ({type(error).__name__}: {one_line(str(error))})"


def rank_shares(
    info: StepInfo, reports: Mapping[str, Sequence[StageReport]], stages: Stages
) -> dict[str, list[RankShare]]:
    """By stage, how long each rank computed for which share of the work; without stages where that is not known, as on
    GPUs. Tensor ranks of a shard have the same work."""
    found, known = {}, _work(info, reports, stages)
    for name, of in reports.items():
        timed = [(one, one.busy_s - one.comm_s) for one in of if one.busy_s is not None and one.comm_s is not None]
        if timed and len(timed) == len(of) and name in known:
            found[name] = [
                RankShare(f"{name} rank {one.rank}", max(0.0, own_s), work)
                for (one, own_s), work in zip(timed, known[name], strict=True)
            ]
    return found


def _work(info: StepInfo, reports: Mapping[str, Sequence[StageReport]], stages: Stages) -> dict[str, list[float]]:
    """By stage, what each rank has to compute. Tensor ranks of a shard have the same."""
    found = {}
    for name, of in reports.items():
        degree, work = stages[name].spec.degrees.tensor, info.work.get(stages[name].spec.part, ())
        if len(of) == len(work) * degree:
            found[name] = [work[one.rank // degree] for one in of]
    return found


def paces(shares: Mapping[str, Sequence[RankShare]], planned: Planned) -> dict[str, Pace] | None:
    """Of each stage, how long its ranks took for their work: see `dhp.observe.stragglers.pace`. None: not known."""
    found = {}
    for name, of_stage in shares.items():
        busy_s = planned.busy_s.get(name)
        own_s = None if busy_s is None else busy_s - planned.comm_s.get(name, 0.0)
        found[name] = pace(of_stage, own_s)
    return {name: one for name, one in found.items() if one is not None} or None


def left_out(info: StepInfo) -> Iterator[str]:
    """Lines about a step's bad samples."""
    yield from (f"skipped: {message}" for message in info.skipped[:SKIPPED_SHOWN])
    more = len(info.skipped) - SKIPPED_SHOWN
    if more > 0:
        yield f"skipped: {more} more; `python -m dhp inspect data` lists them"
