"""Reads what a run has left in its directory."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dhp.config.run_dir import plain_values
from dhp.core.errors import RecordError
from dhp.core.text import did_you_mean, nearest
from dhp.observe.metrics import AnswerMetrics, EvalMetrics, Line, StepMetrics, read_record
from dhp.observe.ranks import Event, RankLine, read_events, read_rank_lines

Kind = TypeVar("Kind", StepMetrics, EvalMetrics, AnswerMetrics)


@dataclass(frozen=True)
class RunRecord:
    """One run's record.

    config: by dotted key. steps, evaluations, answers, ranks: oldest first. faults: one for each attempt that failed,
    as `run_dir/faults` has them. summary: None while the run goes on. broken: lines of metrics.jsonl that cannot be
    read."""

    run_dir: Path
    config: Mapping[str, Any]
    steps: Sequence[StepMetrics]
    evaluations: Sequence[EvalMetrics]
    answers: Sequence[AnswerMetrics]
    ranks: Sequence[RankLine]
    events: Sequence[Event]
    faults: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] | None
    broken: int = 0

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.run_dir.absolute().name

    @property
    def status(self) -> str:
        """`completed`, `failed` or `interrupted`; `not ended`: it still goes on, or was killed."""
        return "not ended" if self.summary is None else str(self.summary.get("status", "not ended"))

    @property
    def compares(self) -> bool:
        """Whether its loss is of preferences."""
        return any(one.preferences for one in (*self.steps, *self.evaluations))

    @property
    def loss_unit(self) -> str:
        return "a preference" if self.compares else "nats a token"

    @property
    def stages(self) -> list[str]:
        """Stages, in their order."""
        for source in (self.ranks[-1].seconds if self.ranks else None, self.steps[-1].busy_s if self.steps else None):
            if source:
                return list(source)
        return []


def read_run(run_dir: Path) -> RunRecord:
    """Read a run's directory. Raises RecordError where there is no run, or it has no step yet."""
    if run_dir.is_file():
        raise RecordError(f"{run_dir} is a file: give the run's directory, as {run_dir.parent}")
    if not run_dir.exists():
        beside = nearest(run_dir.name, sorted(path.parent.name for path in run_dir.parent.glob("*/metrics.jsonl")))
        raise RecordError(
            f"{run_dir} does not exist{did_you_mean([str(run_dir.with_name(beside)) if beside else None])}"
        )
    if not (run_dir / "metrics.jsonl").is_file():
        inside = sorted(path.parent for path in run_dir.glob("*/metrics.jsonl")) if run_dir.is_dir() else []
        stages = f". Runs, or a run's stages, are in it: dhp report {' '.join(map(str, inside))}" if inside else ""
        raise RecordError(f"{run_dir} has no metrics.jsonl, so it is no run's directory{stages}")
    lines = read_record(run_dir)
    steps = _of(lines, StepMetrics)
    summary = _json(run_dir / "summary.json")
    if not steps:
        ended = f". The run {summary.get('status')}: {summary['error']}" if summary and summary.get("error") else ""
        raise RecordError(f"{run_dir}/metrics.jsonl has no step yet: there is nothing to report on{ended}")
    return RunRecord(
        run_dir=run_dir,
        config=_config(run_dir / "config.yaml"),
        steps=steps,
        evaluations=_of(lines, EvalMetrics),
        answers=_of(lines, AnswerMetrics),
        ranks=[line for line in read_rank_lines(run_dir) if line.step <= steps[-1].step],
        events=read_events(run_dir),
        faults=[found for path in sorted((run_dir / "faults").glob("*.json")) if (found := _json(path)) is not None],
        summary=summary,
        broken=_count(run_dir / "metrics.jsonl") - len(lines),
    )


def _of(lines: Sequence[Line], kind: type[Kind]) -> list[Kind]:
    return [line for line in lines if isinstance(line, kind)]


def _count(path: Path) -> int:
    return len(path.read_bytes().splitlines())


def _json(path: Path) -> Mapping[str, Any] | None:
    """A JSON object; None where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _config(path: Path) -> dict[str, Any]:
    return _dotted(plain_values(path)) if path.is_file() else {}


def _dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _dotted(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
