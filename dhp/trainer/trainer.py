"""The training loop: submits steps to a session, records what they report, saves."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dhp.checkpoint.folder import Unfinished, check_writable
from dhp.checkpoint.resume import Start, find_start
from dhp.cluster.watch import Watched, wait_all
from dhp.config.command_line import to_yaml
from dhp.config.resolve import micro_batches
from dhp.config.run_dir import make_run_dir, replaces_checkpoints, run_directory
from dhp.config.schema import Config
from dhp.core.process import ending, ending_on_error, interruptible, say_line
from dhp.observe.metrics import EvalMetrics, read_evaluations
from dhp.observe.recorder import Recorder
from dhp.observe.summary import DataStall
from dhp.step.schedule import make_schedule
from dhp.step.step import StepRefs, train_step
from dhp.trainer.evaluation import Evaluation, due, misses
from dhp.trainer.forecast.planned import costs_ahead, expected, look_ahead
from dhp.trainer.measured import SecondsOfParts
from dhp.trainer.nonfinite import NonfiniteSteps
from dhp.trainer.plan import plan_run
from dhp.trainer.recompute import Recomputing, plans_any
from dhp.trainer.reports import Refs as SpanRefs
from dhp.trainer.reports import (
    Timing,
    Tracing,
    device_memory,
    find_peak,
    left_out,
    make_loggers,
    name_kernels,
    notes,
    overlap_warning,
    step_metrics,
)
from dhp.trainer.resume import recipe
from dhp.trainer.saving import Saver, Saving, saves_after
from dhp.trainer.session import DataPlan, Session
from dhp.trainer.settings import FULLEST_FIRST, kept_settings, measures, resume_line, world
from dhp.trainer.table import table_of_training

STEPS_AHEAD = 1  # submitted beyond the one that runs: no rank waits for the run loop


@dataclass(frozen=True)
class Spans:
    """Refs of all ranks' spans up to here, in a traced run, and their calls."""

    refs: SpanRefs
    watched: list[Watched]


@dataclass(frozen=True)
class Pending:
    """A submitted step. data_ready: when its data were there; watched: all of its calls; saving: what follows it;
    spans: in a traced run."""

    step: int
    refs: StepRefs
    data_ready: float
    watched: list[Watched]
    saving: Saving | None
    spans: Spans | None


def run(config: Config, say: Callable[[str], None] = say_line) -> None:
    """Train as configured. `config` went through `dhp.trainer.preflight.prepare`. say: prints a line before there is
    progress. Raises DhpError; leaves no process."""
    with open_run(config, say) as (run_dir, start):
        begun, resume = (start.checkpoint, start.step), partial(resume_line, config)
        interval, degrees, text = config.training.log_interval, world(config), to_yaml(config)
        loggers = make_loggers(config, run_dir, start.checkpoint is not None)
        recorder = Recorder(run_dir, interval, degrees, text, *begun, resume, say, loggers)
        with recorder, ending_on_error():
            plan = plan_run(config)
            if plan.family.note:
                say(plan.family.note)
            session, unfinished = Session(plan, run_dir, start, say), Unfinished()
            # Unfinished checkpoints go before the record is written, and what ranks added to them after these ended.
            with unfinished, session, recorder.before_teardown(), unfinished, ending():
                Trainer(session, recorder, unfinished).run()


@contextmanager
def open_run(config: Config, say: Callable[[str], None]) -> Iterator[tuple[Path, Start]]:
    """Hold the run's directory, made anew or continued: the directory, and the checkpoint that it starts from. Signals
    raise KeyboardInterrupt meanwhile. Raises ConfigError and CheckpointError."""
    checkpoint_dir = Path(str(config.training.checkpoint_dir))
    with interruptible(), run_directory(config, say) as run_dir:
        start = find_start(config.training.resume, checkpoint_dir, replaces_checkpoints(config))
        start.check(kept_settings(config))
        make_run_dir(config)
        check_writable(checkpoint_dir)
        for line in [*start.quarantine(), *start.changes(recipe(config))]:
            say(line)
        yield run_dir, start


class Trainer:
    """One run in a started session. Holds refs, never tensors."""

    def __init__(self, session: Session, recorder: Recorder, unfinished: Unfinished | None = None):
        """unfinished: checkpoints that are being written, to be removed if the run fails."""
        self.session, self.recorder = session, recorder
        self.config, self.start, self.graph = session.config, session.start, session.graph
        self._saver = Saver(session, recorder.say, unfinished or Unfinished())
        self._judge(())
        self._timeout_s = self.config.cluster.step_timeout_s
        self._last_end = time.perf_counter()
        self._skipped = self.start.skipped_samples
        self._nonfinite = NonfiniteSteps(session, recorder)
        self._noted: set[str] = set()

    def run(self) -> None:
        """Start, train every step that is not done yet, save on the way and at the end, as is asked for."""
        plan = self._open_data()
        missed = self._missed_evaluation()
        if self.start.step >= plan.steps:
            self.recorder.say(f"nothing is left to train: training.max_steps or num_epochs give {plan.steps} steps")
            if not missed:
                return
        self._start_stages(plan, missed)
        if missed:
            self.recorder.say(f"the evaluation after step {self.start.step} was not finished: it is made now")
            self._evaluate(self.start.step)
        pending: deque[Pending] = deque()
        self._last_end = time.perf_counter()
        for step in range(self.start.step, plan.steps):
            reading = self.session.data.request(step)
            while pending and self._ends_before(pending[0], reading):
                self._finish(pending.popleft())
            pending.append(self._submit(step, reading))
            if len(pending) > STEPS_AHEAD:
                self._finish(pending.popleft())
            if due(self.config, step + 1, plan.steps, saves_after(self.config, step + 1, plan)):
                while pending:
                    self._finish(pending.popleft())
                self._evaluate(step + 1)
        while pending:
            self._finish(pending.popleft())
        self._write_spans(self._submit_spans())  # of the final checkpoint

    def _open_data(self) -> DataPlan:
        session, start = self.session, self.start
        self.recorder.say(f"starting {session.describe()}")
        plan = session.open_data(self._tell_measuring)
        self.plan = plan
        if start.checkpoint is not None:
            self.recorder.say(f"continuing after step {start.step} from {start.checkpoint}")
        elif self.config.data.fullest_first:
            self.recorder.say(FULLEST_FIRST)
        session.data_state(start.step)  # asking for it plans the first steps
        self._evaluation = None
        if self.config.data.eval_datasets:
            self.recorder.say(f"opening {', '.join(self.config.data.eval_datasets)} for evaluation")
            self._evaluation = Evaluation(session)
        self._data_stall = DataStall(plan.workers, plan.ahead, self.config.data.balance_window is not None)
        return plan

    def _missed_evaluation(self) -> bool:
        """Whether the run that is continued ended in its evaluation. A whole one counts for the best checkpoint again:
        it may have ended right after it."""
        step, record = self.start.step, self.recorder.record_so_far()
        if not due(self.config, step, self.plan.steps, saves=self.start.checkpoint is not None):
            return False
        assert self._evaluation is not None  # or none would be due
        if misses(self.config, step, record, self._evaluation.prompts()):
            return True
        self._judge(read_evaluations(record, step))
        return False

    def _tell_measuring(self, done: int, parts: int) -> None:
        if done % max(1, parts // 10) == 0:
            self.recorder.say(f"measuring the samples' lengths: {done * 100 // parts}%")

    def _start_stages(self, plan: DataPlan, evaluates: bool) -> None:
        config, session = self.config, self.session
        *table, total = table_of_training(session.plan)
        self.recorder.say("\n".join([total, *(f"{'':9}{line}" for line in table)]))
        self.recorder.say(session.describe_loading())
        session.start_stages(plan.steps)
        warning = overlap_warning(config, self.graph, session.device)
        for line in ([warning] if warning else []) + name_kernels(session.groups, config.cluster.start_timeout_s):
            self.recorder.say(line)
        self._peak, devices = find_peak(session.groups, config.cluster.start_timeout_s, self.recorder.say)
        plans = plans_any(config, self.graph)
        ahead = look_ahead(session, devices, costs=plans and config.memory.budget_gib is not None)
        self.recorder.beside, lines = expected(ahead)
        for line in lines:
            self.recorder.say(line)
        self.schedule = make_schedule(config.training.schedule, self.graph, micro_batches(config))
        self.recomputing = None
        if plans:
            memory = None
            if config.memory.budget_gib is None:
                memory = device_memory(session.groups, config.cluster.start_timeout_s)
            self.recomputing = Recomputing(
                *(session.plan, session.stages, session.device, self.schedule, self.recorder.say, memory),
                counted=costs_ahead(ahead),
            )
        self._seconds = None
        if measures(config) and config.memory.cache_dir is not None:
            self._seconds = SecondsOfParts(config, self.graph, session.plan.family, config.memory.cache_dir)
        self.tracing = None
        if config.training.trace:
            traced = session.groups | {"data": session.data}
            writer = self.recorder.open_trace({name: group.size for name, group in traced.items()})
            self.tracing = Tracing(traced, writer, config.cluster.start_timeout_s)
        if self.start.step < plan.steps:
            self.recorder.say(f"training: step {self.start.step + 1} of {plan.steps}")
        self.recorder.begin(plan.steps, evaluates)

    def _ends_before(self, pending: Pending, reading: list[Watched]) -> bool:
        """Wait for the data of the next step or the end of one that runs: whether the end came first."""
        return wait_all(pending.watched, self._timeout_s, until=reading[-1].ref)

    def _submit(self, step: int, reading: list[Watched]) -> Pending:
        wait_all(reading, self._timeout_s)
        data_ready = time.perf_counter()
        session = self.session
        refs = train_step(session.stages, self.schedule, self.graph.ties, session.take_batch(step))
        watched = session.take_watched()
        spans = self._submit_spans()
        return Pending(step, refs, data_ready, watched, self._saver.submit(step + 1, self.plan), spans)

    def _submit_spans(self) -> Spans | None:
        if self.tracing is None:
            return None
        refs = self.tracing.submit()
        return Spans(refs, [*self.session.take_watched(), *self.session.data.take_watched()])

    def _finish(self, pending: Pending) -> None:
        wait_all(pending.watched, self._timeout_s)
        end = time.perf_counter()
        begun, self._last_end = self._last_end, end
        timing = Timing(end - begun, max(0.0, pending.data_ready - begun), self._peak)
        info = self.session.info(pending.refs.info)
        for line in left_out(info):
            self.recorder.say(line)
        self._skipped += len(info.skipped)
        reports = {name: self.session.values(refs) for name, refs in pending.refs.reports.items()}
        left = (self._skipped, self._nonfinite.add(reports))
        metrics = step_metrics(info, reports, timing, self.session.stages, *left)
        self._tell_once(notes(reports, metrics, timing))
        self.recorder.record(metrics)
        self._nonfinite.tell(metrics)
        if self.tracing is not None:
            with self.recorder.writing():
                self.tracing.mark_step(metrics, begun, end)
        advice = self._data_stall.add(timing.step_s, timing.data_s, info.data_s, info.measure_s)
        if advice is not None:
            self.recorder.say(advice)
        if self.recomputing is not None:
            self.recomputing.learn(reports)
        if self._seconds is not None:
            self._seconds.learn(reports)
        self._write_spans(pending.spans)
        if pending.saving is not None:
            self.recorder.checkpoint = self._saver.finish(pending.saving, self.plan, self._skipped)
            self._saver.kept.finished(pending.saving.step)
            self._last_end = time.perf_counter()  # writing is no part of the next step's time

    def _evaluate(self, step: int) -> None:
        """Measure the loss on other data; say which checkpoint is best, where it is to be said."""
        assert self._evaluation is not None
        found = self._evaluation.run(step)
        self.recorder.record_evaluation(found)
        self.recorder.record_answers(self._evaluation.answers(step))
        self._judge(found)
        self._last_end = time.perf_counter()  # evaluating is no part of the next step's time

    def _judge(self, found: Sequence[EvalMetrics]) -> None:
        """Whether an evaluation makes a checkpoint the best one."""
        self._saver.kept.evaluated(found)
        self.recorder.best = self._saver.kept.best

    def _tell_once(self, notes: Iterable[str]) -> None:
        for note in notes:
            if note not in self._noted:
                self.recorder.say(note)
                self._noted.add(note)

    def _write_spans(self, spans: Spans | None) -> None:
        if spans is not None and self.tracing is not None:
            wait_all(spans.watched, self._timeout_s)  # a data worker may die that has no part in the step
            of_ranks = {name: self.session.values(refs) for name, refs in spans.refs.items()}
            with self.recorder.writing():
                self.tracing.write(of_ranks)
