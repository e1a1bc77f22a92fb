"""The training loop: submits steps, records reports, saves."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from dhp.checkpoint.folder import Unfinished
from dhp.cluster.hangs.watch import Watched, wait_all
from dhp.config.command_line import to_yaml
from dhp.config.schema import Config
from dhp.core.errors import CheckpointError, ClusterError, DataError, Diverged, MoreDevices, PartFailed, RecordError
from dhp.core.process import asked_to_stop, deferring, ending, ending_on_error, say_line
from dhp.core.reports import StageReport
from dhp.observe.metrics import EvalMetrics, Line, StepMetrics, read_evaluations
from dhp.observe.ranks import NONFINITE
from dhp.observe.recorder import Recorder
from dhp.observe.summary import DataStall
from dhp.plan.run_plan import plan_run, world
from dhp.step.step import StepRefs, train_step
from dhp.supervise.attempt import (
    LOADING,
    SAVING,
    TRAINING,
    goes_on,
    larger_layouts,
    restarts,
    tell_device,
    tell_opened,
    tell_saved,
    tell_state,
    telling_end,
)
from dhp.trainer.early_stopping import EarlyStopping
from dhp.trainer.evaluation import Evaluation, due, misses
from dhp.trainer.preference_means import step_means
from dhp.trainer.ready import start_stages
from dhp.trainer.recomputing import naming_relief, with_more_recomputed
from dhp.trainer.references import find_references
from dhp.trainer.saving import SaveQuery, Saver, Saving
from dhp.trainer.session import DataPlan, Session, open_run
from dhp.trainer.settings import FULLEST_FIRST, resume_line
from dhp.trainer.step_reports import Refs as SpanRefs
from dhp.trainer.step_reports import Timing, make_loggers, notes, record_step, step_metrics, write_page


@dataclass(frozen=True)
class StepSpans:
    """Refs of all ranks' spans up to here, in a traced run, and their calls."""

    refs: SpanRefs
    watched: list[Watched]


@dataclass(frozen=True)
class Pending:
    """A submitted step. data_ready: when its data were there; watched: all of its calls; saving: what follows it;
    asked: whether an earlier checkpoint is written; spans: in a traced run."""

    step: int
    refs: StepRefs
    data_ready: float
    watched: list[Watched]
    saving: Saving | None
    asked: SaveQuery | None
    spans: StepSpans | None


@contextmanager
def naming_step(step: int) -> Iterator[None]:
    """A part that fails in here failed in this step (0-based), which its error then names."""
    try:
        yield
    except PartFailed as error:
        raise error.at_step(step + 1) from error.__cause__
    except ClusterError as error:
        raise ClusterError(f"step {step + 1}: {error}", step + 1) from error.__cause__


NAMED = 20  # samples of a step that a line names
ADVICE = "Lower training.learning_rate, set training.max_grad_norm, or look at the samples"


class NonfiniteCount:
    """How many steps updated nothing: of the run, and in a row. limit: `training.max_nonfinite_steps`."""

    def __init__(self, limit: int, count: int = 0):
        """count: of the steps before, in a run that is continued."""
        self.count, self.in_a_row, self._limit = count, 0, limit

    @property
    def too_many(self) -> bool:
        """Whether the step that was added last is to be the run's last."""
        return self.in_a_row >= max(1, self._limit)

    def add(self, reports: Mapping[str, Sequence[StageReport]]) -> int:
        """A step has ended, of which every rank has reported; the count of the run."""
        finite = all(report.finite for of_stage in reports.values() for report in of_stage)
        self.in_a_row = 0 if finite else self.in_a_row + 1
        self.count += not finite
        return self.count


class NonfiniteSteps:
    """Those of a run."""

    def __init__(self, session: Session, recorder: Recorder):
        self._session, self._recorder = session, recorder
        self._limit, step = session.config.training.max_nonfinite_steps, session.start.step
        self._found = NonfiniteCount(self._limit, count_before(recorder.record_so_far(), step) if step else 0)

    def add(self, reports: Mapping[str, Sequence[StageReport]]) -> int:
        """As `NonfiniteCount.add`."""
        return self._found.add(reports)

    def tell(self, metrics: StepMetrics) -> None:
        """Say a line about the step that was added last, if it updated nothing. Raises Diverged where it is one too
        many in a row."""
        if not self._found.in_a_row:
            return
        timeout_s = self._session.config.cluster.step_timeout_s
        names = self._session.data.ask("sample_names", metrics.step - 1, timeout_s=timeout_s)
        if self._found.too_many:
            raise Diverged(last_line(metrics, self._found.in_a_row, self._limit, names))
        text = line(metrics, self._found.in_a_row, self._limit, names)
        self._recorder.say(text)
        self._recorder.note(NONFINITE, metrics.step, text=text)


def line(metrics: StepMetrics, in_a_row: int, limit: int, names: Sequence[str]) -> str:
    """About a step that updated nothing, of samples of these names."""
    return (
        f"{_found(metrics)}: nothing was updated ({in_a_row} in a row; training.max_nonfinite_steps={limit} end the "
        f"run). Its samples, for `python -m dhp inspect sample`: {listed(names)}"
    )


def last_line(metrics: StepMetrics, in_a_row: int, limit: int, names: Sequence[str]) -> str:
    """About the one that ends a run."""
    before = metrics.step - in_a_row
    return (
        f"{_found(metrics)}; training.max_nonfinite_steps={limit}, and this is number {in_a_row} in a row. None of "
        f"them was taken: weights are those after step {before}. {ADVICE} by `python -m dhp inspect sample`: "
        f"{listed(names)}"
    )


def count_before(lines: Sequence[Line], step: int) -> int:
    """Steps that updated nothing up to `step`, by the record of a run."""
    counts = [one.skipped_steps or 0 for one in lines if isinstance(one, StepMetrics) and one.step <= step]
    return counts[-1] if counts else 0


def listed(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = f"; and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return "; ".join(names[:NAMED]) + more


def _found(metrics: StepMetrics) -> str:
    return f"the gradient norm of step {metrics.step} is {metrics.grad_norm} and its loss {metrics.loss}"


STEPS_AHEAD = 1  # submitted beyond the one that runs: no rank waits for the run loop


def run(config: Config, say: Callable[[str], None] = say_line) -> None:
    """Train as configured. `config` went through `dhp.trainer.preflight.prepare`. say: prints a line before there is
    progress. A run that ends for want of memory under a plan that keeps activations goes on with less kept. Raises
    DhpError; leaves no process."""
    with_more_recomputed(config, partial(_run, say=say), say)


def _run(config: Config, say: Callable[[str], None]) -> None:
    with open_run(config, say) as (run_dir, start):
        tell_opened()
        begun, resume = (start.checkpoint, start.step), partial(resume_line, config)
        interval, degrees, text = config.training.log_interval, world(config), to_yaml(config)
        loggers = make_loggers(config, run_dir, start.checkpoint is not None)
        about = (run_dir, interval, degrees, text, *begun)
        recorder = Recorder(*about, resume, say, loggers, restarts(), goes_on, write_page, config.plugins)
        with recorder, ending_on_error():
            plan = plan_run(config)
            if plan.family.note:
                say(plan.family.note)
            session, unfinished = Session(plan, run_dir, start, say), Unfinished()
            # Unfinished checkpoints go before the record is written, and what ranks added to them after these ended.
            with (
                unfinished,
                session,
                recorder.before_teardown(),
                unfinished,
                ending(),
                telling_end(),
                naming_relief(plan, lambda: recorder.checkpoint != start.checkpoint),
            ):
                Trainer(session, recorder, unfinished).run()


class Trainer:
    """One run in a started session. Holds refs, never tensors."""

    def __init__(self, session: Session, recorder: Recorder, unfinished: Unfinished | None = None):
        """unfinished: checkpoints that are being written, to be removed if the run fails."""
        self.session, self.recorder = session, recorder
        self.config, self.start, self.graph = session.config, session.start, session.graph
        self._saver = Saver(session, recorder.say, unfinished or Unfinished(), recorder.note)
        self._stopping = EarlyStopping(self.config.training.early_stopping, self.start.early_stopping)
        self._saver.early_stopping = self._stopping.state
        self._judge(())
        self._timeout_s = self.config.cluster.step_timeout_s
        self._last_end, self._saving_s = time.perf_counter(), 0.0  # saving_s: of a step, no part of its time
        self._skipped = self.start.skipped_samples
        self._nonfinite = NonfiniteSteps(session, recorder)
        self._noted: set[str] = set()
        self._may_grow = False  # there is a checkpoint since it was last asked whether there are more devices

    def run(self) -> None:
        """Start, train every step that is not done yet, save on the way and at the end, as is asked for."""
        plan = self._open_data()
        missed = self._missed_evaluation()
        if self.start.step >= plan.steps or self._stopping.stops:
            why = f"nothing is left to train: training.max_steps or num_epochs give {plan.steps} steps"
            self.recorder.say(self._stopping.line() if self._stopping.stops else why)
            if not missed:
                return
        tell_state(LOADING)
        self.ready = start_stages(self.session, self.recorder, plan.steps)
        find_references(self.session, self._evaluation)
        if self.start.step < plan.steps and not self._stopping.stops:
            self.recorder.say(f"training: step {self.start.step + 1} of {plan.steps}")
        untrained = self.start.step == 0 and self.config.training.eval_on_start  # again, where a fault ended the first
        self.recorder.begin(plan.steps, missed or untrained)
        tell_state(TRAINING)
        if missed:
            self.recorder.say(f"the evaluation after step {self.start.step} was not finished: it is made now")
        if missed or untrained:
            self._evaluate(self.start.step)
        try:
            with deferring():
                done = self._train()
        except (DataError, Diverged, RecordError):
            self._saver.rescue()
            self._note_checkpoint()
            raise
        if asked_to_stop() and done < plan.steps and not self._stopping.stops:
            self._save_interrupted(done)
            raise KeyboardInterrupt

    def _train(self) -> int:
        """Train until the last step, or until a signal asks to stop; the steps that are done."""
        plan, pending = self.plan, deque[Pending]()
        self._last_end, step, saved = time.perf_counter(), self.start.step, False
        while step < plan.steps and not asked_to_stop() and not self._stopping.stops:
            self._grow()
            reading = self.session.data.request(step)
            while pending and self._ends_before(pending[0], reading):
                self._finish(pending.popleft())
            submitted = self._submit(step, reading)
            step += 1
            if saved := self._saver.is_due(step, plan):
                if self._saver.busy:  # one at a time
                    self._finish_all(pending)
                    with naming_step(submitted.step):  # the question queues behind it
                        wait_all(submitted.watched, self._timeout_s)
                    self._saving_s = self._saver.finish()
                    self._note_checkpoint()
                submitted = replace(submitted, saving=self._saver.begin(step))
            pending.append(submitted)
            if len(pending) > STEPS_AHEAD:
                self._finish(pending.popleft())
            if due(self.config, step, plan.steps, saved):
                self._finish_all(pending)
                self._evaluate(step)
        self._finish_all(pending)
        if self._stopping.stops and step > self.start.step:
            self.recorder.say(self._stopping.line())
            if self.config.training.save_final and not self._saver.has(step):
                self._saver.save(step, plan, self._skipped)
        if step == plan.steps and self._saver.busy:
            self.recorder.say("saving the final checkpoint")
        self._saver.finish()
        self._note_checkpoint()
        if saved and step == plan.steps:
            self._saver.require(step)
        self._write_spans(self._submit_spans(step))  # of the last checkpoint
        return step

    def _save_interrupted(self, done: int) -> None:
        """Save what was trained since the newest checkpoint, where the run saves at all."""
        training = self.config.training
        saves = training.save_final or training.save_steps or training.save_epochs or training.save_minutes
        if saves and done > self.start.step and not self._saver.has(done):
            self.recorder.say(f"interrupted after step {done}: saving it. Another signal ends the run at once")
            try:
                self._saver.save(done, self.plan, self._skipped)
            except CheckpointError as error:
                self.recorder.say(f"warning: {error}")
            self._note_checkpoint()

    def _finish_all(self, pending: deque[Pending]) -> None:
        while pending:
            self._finish(pending.popleft())

    def _open_data(self) -> DataPlan:
        session, start = self.session, self.start
        tell_device(session.device)
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
        found = read_evaluations(record, step)
        unknown = self._stopping.on and step > 0 and not self._stopping.has(step) and not found
        if unknown or misses(self.config, step, record, self._evaluation.prompts()):
            return True
        self._judge(found)
        return False

    def _tell_measuring(self, done: int, parts: int) -> None:
        if done % max(1, parts // 10) == 0:
            self.recorder.say(f"measuring the samples' lengths: {done * 100 // parts}%")

    def _ends_before(self, pending: Pending, reading: list[Watched]) -> bool:
        """Wait for the data of the next step or the end of one that runs: whether the end came first."""
        with naming_step(pending.step):
            return wait_all(pending.watched, self._timeout_s, until=reading[-1].ref)

    def _submit(self, step: int, reading: list[Watched]) -> Pending:
        with naming_step(step):
            wait_all(reading, self._timeout_s)
        data_ready = time.perf_counter()
        session = self.session
        refs = train_step(session.stages, self.ready.schedule, self.graph.ties, session.take_batch(step))
        asked = self._saver.ask()
        watched = session.take_watched()
        spans = self._submit_spans(step + 1)
        return Pending(step, refs, data_ready, watched, None, asked, spans)

    def _submit_spans(self, step: int) -> StepSpans | None:
        if self.ready.tracing is None:
            return None
        refs = self.ready.tracing.submit(step)
        return StepSpans(refs, [*self.session.take_watched(), *self.session.data.take_watched()])

    def _finish(self, pending: Pending) -> None:
        with naming_step(pending.step):
            wait_all(pending.watched, self._timeout_s)
        end, self._saving_s = time.perf_counter() - self._saving_s, 0.0
        begun, self._last_end = self._last_end, time.perf_counter()
        planned = self.recorder.beside.planned
        timing = Timing(end - begun, max(0.0, pending.data_ready - begun), self.ready.peak, planned)
        info = self.session.info(pending.refs.info)
        self._skipped += len(info.skipped)
        reports = {name: self.session.values(refs) for name, refs in pending.refs.reports.items()}
        left = (self._skipped, self._nonfinite.add(reports))
        metrics = step_metrics(info, reports, timing, self.session.stages, *left)
        if info.marks:
            metrics = replace(metrics, preferences=step_means(info, reports, self.session.stages, self.config.training))
        self._tell_once(notes(reports, metrics, timing))
        record_step(self.recorder, metrics, info, reports, self.session.stages)
        self._nonfinite.tell(metrics)
        if self.ready.tracing is not None:
            with self.recorder.writing():
                self.ready.tracing.mark_step(metrics, begun, end)
        advice = self._data_stall.add(timing.step_s, timing.data_s, info.data_s, info.measure_s)
        if advice is not None:
            self.recorder.say(advice)
        if self.ready.recomputing is not None:
            self.ready.recomputing.learn(reports)
        self._write_spans(pending.spans)
        self._saver.look(pending.asked)
        if pending.saving is not None:
            tell_state(SAVING)
            with naming_step(pending.step):
                self._saver.staged(pending.saving, self.plan, self._skipped)
            tell_state(TRAINING)
            self._last_end = time.perf_counter()  # copying is no part of the next step's time
        self._note_checkpoint()

    def _note_checkpoint(self) -> None:
        """Say which checkpoint is the newest, where there is another one."""
        newest = self._saver.newest
        if newest is not None and newest != self.recorder.checkpoint:
            self.recorder.checkpoint, self._may_grow = newest, True
            tell_saved(newest)

    def _grow(self) -> None:
        """Behind a new checkpoint, end an attempt with fewer devices than the run had, where more are there again.
        Raises MoreDevices."""
        grows, self._may_grow = self._may_grow, False
        larger = larger_layouts()
        if not (grows and larger):
            return
        there = self.session.devices_available()
        if there >= min(larger):
            raise MoreDevices(f"{there} devices are there again: the run goes on in a larger layout", there)

    def _evaluate(self, step: int) -> None:
        """Measure the loss on other data; say which checkpoint is best, where it is to be said."""
        assert self._evaluation is not None
        self._saver.finish()  # which checkpoint is best is known of complete ones
        self._note_checkpoint()
        with naming_step(step - 1):
            found = self._evaluation.run(step)
        self.recorder.record_evaluation(found)
        self.recorder.record_answers(self._evaluation.answers(step))
        self._judge(found)
        self._last_end = time.perf_counter()  # evaluating is no part of the next step's time

    def _judge(self, found: Sequence[EvalMetrics]) -> None:
        """Whether an evaluation makes a checkpoint the best one."""
        self._saver.kept.evaluated(found)
        self._stopping.add(found)
        self.recorder.best = self._saver.kept.best

    def _tell_once(self, notes: Iterable[str]) -> None:
        for note in notes:
            if note not in self._noted:
                self.recorder.say(note)
                self._noted.add(note)

    def _write_spans(self, spans: StepSpans | None) -> None:
        if spans is not None and self.ready.tracing is not None:
            wait_all(spans.watched, self._timeout_s)  # a data worker may die that has no part in the step
            of_ranks = {name: self.session.values(refs) for name, refs in spans.refs.items()}
            with self.recorder.writing():
                self.ready.tracing.write(of_ranks)
