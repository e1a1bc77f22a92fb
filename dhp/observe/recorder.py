"""One run's record: metrics as steps end, progress on the terminal, summary and closing table however it ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from dhp.observe.metrics import MetricsWriter, StepMetrics, keep_steps
from dhp.observe.progress import Progress
from dhp.observe.report import closing_table
from dhp.observe.summary import Summary, write_summary
from dhp.observe.trace import TraceWriter


class Recorder:
    """A context around a run. An exception that passes through is recorded, not kept."""

    def __init__(
        self,
        run_dir: Path,
        log_interval: int,
        world: Mapping[str, Mapping[str, Any]],
        config: str,
        resumed_from: Path | None = None,
        done: int = 0,
    ):
        """config: what config.yaml will be. resumed_from: the checkpoint that the run continues; done: the steps before
        it."""
        self.run_dir, self._config = run_dir, config
        self.checkpoint = self._resumed_from = resumed_from
        self._done = done
        self._log_interval, self._world = log_interval, world
        self._steps: list[StepMetrics] = []
        self._progress: Progress | None = None
        self._trace: TraceWriter | None = None
        self._metrics: MetricsWriter | None = None
        self._concluded = False

    def __enter__(self) -> Recorder:
        if self._resumed_from is None or not (self.run_dir / "metrics.jsonl").exists():
            self._open()
        return self

    def open_trace(self, groups: Mapping[str, int]) -> TraceWriter:
        """Where the run's trace is written, closed with the record. groups: rows (ranks) of each group, by name."""
        self._trace = TraceWriter(self.run_dir, groups)
        return self._trace

    def begin(self, total_steps: int) -> None:
        """Training begins: from here on there is progress to show. The record of a run that is continued is left as it
        was until now, when nothing can be refused any more."""
        if self._metrics is None:
            self._open()
        self._progress = Progress(total_steps, self._log_interval, done=self._done)

    def say(self, text: str) -> None:
        """A line to whoever is watching."""
        if self._progress is None:
            print(text, flush=True)
        else:
            self._progress.note(text)

    def record(self, metrics: StepMetrics) -> None:
        """One step has ended."""
        self._steps.append(_in_brief(metrics))
        self._metrics.write(metrics)
        if self._progress is not None:
            self._progress.update(metrics)

    def _open(self) -> None:
        (self.run_dir / "config.yaml").write_text(self._config)
        self._steps = [_in_brief(metrics) for metrics in keep_steps(self.run_dir, self._done)]
        (self.run_dir / "summary.json").unlink(missing_ok=True)  # of the run that is being continued
        self._metrics = MetricsWriter(self.run_dir)

    @contextmanager
    def before_teardown(self) -> Iterator[None]:
        """Write the record when this block ends, not when the whole run does: a cluster that is already gone can
        take the process with it while it is being left."""
        try:
            yield
        except BaseException as error:
            self._conclude(error)
            raise
        self._conclude(None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._conclude(error)

    def _conclude(self, error: BaseException | None) -> None:
        """Write the summary and print the table, once."""
        if self._concluded:
            return
        self._concluded = True
        if self._metrics is None and error is not None:  # it could not go on: its record stays as it was
            return
        if self._metrics is None:
            self._open()
        if self._progress is not None:
            self._progress.close()
        self._metrics.close()
        if self._trace is not None:
            self._trace.close()
        summary = Summary.of(
            self._steps,
            self._done,
            status=_status(error),
            error=_told(error),
            world=self._world,
            resumed_from=None if self._resumed_from is None else str(self._resumed_from),
        )
        write_summary(self.run_dir, summary)
        print("\n" + closing_table(summary, self.run_dir.absolute(), self.checkpoint), flush=True)


def _in_brief(metrics: StepMetrics) -> StepMetrics:
    """What the summary needs: a run may have a million steps."""
    return StepMetrics(step=metrics.step, loss=metrics.loss, step_s=metrics.step_s, tokens=metrics.tokens)


def _status(error: BaseException | None) -> str:
    if error is None:
        return "completed"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def _told(error: BaseException | None) -> str | None:
    if error is None or isinstance(error, KeyboardInterrupt):
        return None
    return str(error) or type(error).__name__
