"""Records one run from its first step to its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from dhp.core.errors import ConfigError, RecordError
from dhp.core.process import say_line
from dhp.observe.loggers import Loggers
from dhp.observe.metrics import (
    AnswerMetrics,
    EvalMetrics,
    Line,
    MetricsWriter,
    StepMetrics,
    flat,
    keep_steps,
    read_evaluations,
    read_record,
)
from dhp.observe.ranks import (
    END,
    EVALUATION,
    START,
    EventWriter,
    RankLine,
    RankShare,
    RankWriter,
    Stragglers,
    keep_rank_lines,
)
from dhp.observe.summary import Planned, PlanVersusRun, StepTotals, Summary, write_summary
from dhp.observe.terminal import Progress, answer_line, closing_table, eval_line
from dhp.observe.trace import TraceWriter


class Recorder:
    """A context around a run. An exception that passes through is recorded, not kept.

    Raises RecordError when run_dir cannot be written, but never in place of the exception that ended the run."""

    def __init__(
        self,
        run_dir: Path,
        log_interval: int,
        world: Mapping[str, Mapping[str, Any]],
        config: str,
        resumed_from: Path | None = None,
        done: int = 0,
        resume: Callable[[Path | None], str] | None = None,
        say: Callable[[str], None] = say_line,
        loggers: Loggers | None = None,
        restarts: int = 0,
        goes_on: Callable[[BaseException], bool] = lambda error: False,
        report: Callable[[Path], str | None] = lambda run_dir: None,
        plugins: Sequence[str] = (),
    ):
        """config: what config.yaml will be. resumed_from: the checkpoint that the run continues; done: the steps before
        it. resume: how to go on after the newest checkpoint, for a run that did not complete. say: prints a line before
        there is progress. loggers: get every step too. restarts: of the run, before this
        attempt of it. goes_on: whether another attempt may follow an error; the closing table is its matter then.
        report: makes a page of the record when it is whole; what is to be said of it. plugins: of its configuration."""
        self.run_dir, self._config = run_dir, config
        self.checkpoint = self._resumed_from = resumed_from
        self.best: str | None = None  # which checkpoint is, by training.best_metric
        self._done, self._resume, self._restarts = done, resume, restarts
        self._say, self._loggers = say, loggers
        self._log_interval, self._world = log_interval, world
        self._steps = StepTotals()
        self._progress: Progress | None = None
        self._trace: TraceWriter | None = None
        self._metrics: MetricsWriter | None = None
        self._ranks: RankWriter | None = None
        self._events: EventWriter | None = None
        self._concluded, self._goes_on, self._report = False, goes_on, report
        self._plugins = plugins
        self._evaluated: Sequence[EvalMetrics] = ()
        self.beside = PlanVersusRun(Planned())
        self._stragglers = Stragglers()

    def __enter__(self) -> Recorder:
        if self._resumed_from is None or not (self.run_dir / "metrics.jsonl").exists():
            self._open()
        return self

    def open_trace(self, groups: Mapping[str, int]) -> TraceWriter:
        """Open the writer of the run's trace, closed with the record. groups: rows (ranks) of each group, by name."""
        with self.writing():
            self._trace = TraceWriter(self.run_dir, groups)
        return self._trace

    def begin(self, total_steps: int, evaluates: bool = False) -> None:
        """Training begins: from here on there is progress to show. The record of a run that is continued is left as it
        was until now, when nothing can be refused any more. evaluates: with the last step done, evaluated anew."""
        if self._metrics is None:
            self._open(evaluates)
        if self._loggers is not None:
            self._loggers.begin()
        self._progress = Progress(total_steps, self._log_interval, done=self._done)
        self.note(START, self._done, text="" if self._resumed_from is None else str(self._resumed_from))

    def record_so_far(self) -> list[Line]:
        """The lines of metrics.jsonl: of the run that is continued, before training begins all of them."""
        return read_record(self.run_dir) if (self.run_dir / "metrics.jsonl").exists() else []

    def say(self, text: str) -> None:
        """A line for the terminal."""
        if self._progress is None:
            self._say(text)
        else:
            self._progress.note(text)

    def record(self, metrics: StepMetrics) -> None:
        """One step has ended."""
        self._steps.add(metrics)
        self.beside.add(metrics)
        with self.writing():
            numbers = self._opened.write(metrics)
        self.log(metrics.step, numbers)
        if self._progress is not None:
            self._progress.update(metrics)

    def record_ranks(self, line: RankLine) -> None:
        """What each rank did in the step that was recorded last."""
        assert self._ranks is not None
        with self.writing():
            self._ranks.write(line)

    def note(self, event: str, step: int, seconds: float | None = None, text: str = "") -> None:
        """Something happened beside steps: see `dhp.observe.ranks`."""
        if self._events is not None:
            with self.writing():
                self._events.write(event, step, seconds, text)

    def compare_ranks(self, stages: Mapping[str, Sequence[RankShare]]) -> None:
        """How long the ranks of a step computed, by stage: those that are slow are named."""
        for message in self._stragglers.add(stages):
            self.say(f"warning: {message}")

    def record_evaluation(self, found: Sequence[EvalMetrics]) -> None:
        """An evaluation has ended: lines about its datasets."""
        for metrics in found:
            with self.writing():
                numbers = self._opened.write_evaluation(metrics, alone=len(found) == 1)
            self.log(metrics.step, numbers)
            self.say(eval_line(metrics))
        self._evaluated = found
        if found:
            text = "; ".join(eval_line(metrics) for metrics in found)
            self.note(EVALUATION, found[0].step, sum(metrics.seconds for metrics in found), text)

    def record_answers(self, found: Sequence[AnswerMetrics]) -> None:
        """Answers were generated with an evaluation."""
        for metrics in found:
            with self.writing():
                self._opened.write_answer(metrics)
            self.say(answer_line(metrics))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Hand numbers of a step to the loggers, by their names: `loss`, `eval/loss`. Nothing is written to
        metrics.jsonl."""
        if self._loggers is not None:
            self._loggers.log(step, numbers)
            for message in self._loggers.take_messages():
                self.say(message)

    @property
    def _opened(self) -> MetricsWriter:
        assert self._metrics is not None
        return self._metrics

    def _open(self, evaluates: bool = False) -> None:
        with self.writing():
            (self.run_dir / "config.yaml").write_text(self._config, encoding="utf-8")
            kept = keep_steps(self.run_dir, self._done, evaluates)
            self._steps = StepTotals(line for line in kept if isinstance(line, StepMetrics))
            self._evaluated = read_evaluations(kept)
            (self.run_dir / "summary.json").unlink(missing_ok=True)  # of the run that is being continued
            keep_rank_lines(self.run_dir, self._done)
            self._metrics = MetricsWriter(self.run_dir)
            self._ranks, self._events = RankWriter(self.run_dir), EventWriter(self.run_dir)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a failure to write in here, as of a full disk, into RecordError."""
        try:
            yield
        except OSError as error:
            raise RecordError(
                f"run_dir={self.run_dir} cannot be written ({error.strerror or error}). Make room there, or choose "
                "another run_dir; training.resume continues from the last checkpoint"
            ) from error

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
        if self._loggers is not None:
            self._loggers.wait(say_line)

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
        self.note_end(error)
        lost = self._close()
        failed = error if error is not None else lost
        summary = Summary.of(
            self._steps,
            self._done,
            status=_status(failed),
            error=_message(failed),
            world=self._world,
            restarts=self._restarts,
            resumed_from=None if self._resumed_from is None else str(self._resumed_from),
            eval_loss={one.dataset or "all": one.loss for one in self._evaluated} or None,
            eval_accuracy={one.dataset or "all": one.accuracy for one in self._evaluated} or None,
            eval_exact={one.dataset or "all": one.exact for one in self._evaluated} or None,
            stragglers=tuple(self._stragglers.named),
            **self.beside.summary(),
        )
        try:
            with self.writing():
                write_summary(self.run_dir, summary)
        except RecordError as again:
            lost = lost or again
        self._end_loggers(summary)
        refused = self._steps.last is None and isinstance(error, ConfigError)  # it leaves no directory to name
        if not refused and not (error is not None and self._goes_on(error)):
            print("\n" + self._table(summary), flush=True)
        if lost is not None and error is None:
            raise lost
        if lost is not None and str(lost) != str(error):
            print(f"the run's record is not complete: {lost}", file=sys.stderr, flush=True)

    def note_end(self, error: BaseException | None) -> None:
        """The attempt ends; a file that cannot be written is another's matter."""
        with suppress(RecordError):
            self.note(END, self._steps.last or self._done, text=_message(error) or _status(error))

    def _end_loggers(self, summary: Summary) -> None:
        """Tell them how the run ended. They close it while the actors end; `__exit__` waits for that."""
        if self._loggers is not None:
            self._loggers.log(summary.steps, flat(summary.figures(), "summary/"))
            self._loggers.end(summary.status)

    def _table(self, summary: Summary) -> str:
        stopped = summary.status != "completed" and (summary.steps or self.checkpoint is not None)
        more = {"resume": self._resume(self.checkpoint)} if self._resume and stopped else {}
        line = self.beside.line()
        page = self._report(self.run_dir) if self._steps.last is not None else None
        more |= ({} if line is None else {"planned": line}) | ({} if page is None else {"report": page})
        return closing_table(summary, self.run_dir.absolute(), self.checkpoint, self.best, self._plugins, **more)

    def _close(self) -> RecordError | None:
        """Close all files, whatever the others do; the first failure."""
        lost = None
        files = (self._metrics, self._ranks, self._events, self._trace)
        for close in (file.close for file in files if file is not None):
            try:
                with self.writing():
                    close()
            except RecordError as error:
                lost = lost or error
        return lost


def _status(error: BaseException | None) -> str:
    if error is None:
        return "completed"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def _message(error: BaseException | None) -> str | None:
    if error is None or isinstance(error, KeyboardInterrupt):
        return None
    return str(error) or type(error).__name__
