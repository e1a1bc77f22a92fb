"""The run loop: starts both parts and the dataset actor, submits steps, records what they report, saves."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from dhp.base.interrupts import ending, ending_on_error, interruptible
from dhp.base.messages import StageReport, StepInfo
from dhp.batching.loader import make_feed
from dhp.checkpoint.folder import Unfinished, check_writable, finish_checkpoint, open_checkpoint
from dhp.checkpoint.resume import Start, find_start
from dhp.cluster.cluster import Cluster, Layout
from dhp.cluster.runtime import chosen_address
from dhp.cluster.watch import Watched, wait_all
from dhp.config.load import to_yaml
from dhp.config.resolve import micro_batches
from dhp.config.run_dir import replaces_checkpoints, run_directory
from dhp.config.schema import Config
from dhp.models.registry import auxiliary_files
from dhp.models.weights import start_limit_s, weight_bytes
from dhp.observe.data_stall import KeepingUp
from dhp.observe.metrics import StepMetrics
from dhp.observe.mfu import utilisation
from dhp.observe.recorder import Recorder
from dhp.run.adaptive_recompute import Recomputing, activation_bytes
from dhp.run.devices import find_peak
from dhp.run.settings import degrees, feed_settings, kept_settings, needed_paths, part_settings, resume_line, world
from dhp.run.trace_collection import Refs as SpanRefs
from dhp.run.trace_collection import Tracing
from dhp.step.schedule import SCHEDULES, TEXT, VISION
from dhp.step.stages import Batch, make_parts
from dhp.step.step import StepRefs, train_step
from dhp.trainers.text import TextTrainer
from dhp.trainers.vision import VisionTrainer

NUMBERS = {"vision": VISION, "text": TEXT}
TOLD = 20  # messages of skipped samples in one step
AHEAD = 1  # steps submitted beyond the one that runs: their data is read meanwhile, and no rank waits for the driver


@dataclass(frozen=True)
class Saving:
    """A submitted checkpoint: the directory that ranks write into after `step` optimizer steps, and their calls."""

    step: int
    folder: Path
    watched: list[Watched]


@dataclass(frozen=True)
class Spans:
    """What will tell who did what up to here, in a traced run, and its calls."""

    refs: SpanRefs
    watched: list[Watched]


@dataclass(frozen=True)
class Pending:
    """A submitted step. reading: the call that reads its data; watched: all of its calls; saving: what follows it;
    spans: in a traced run."""

    step: int
    refs: StepRefs
    reading: list[Watched]
    watched: list[Watched]
    saving: Saving | None
    spans: Spans | None


def run(config: Config) -> None:
    """Train as configured. `config` went through `dhp.run.preflight.prepare`. Raises DhpError; leaves no process."""
    checkpoint_dir = Path(str(config.training.checkpoint_dir))
    start = find_start(config.training.resume, checkpoint_dir, replaces_checkpoints(config))
    start.check(kept_settings(config))
    with interruptible(), run_directory(config) as run_dir:
        check_writable(checkpoint_dir)
        for line in start.put_aside():
            print(line, flush=True)
        begun, resume = (start.checkpoint, start.step), partial(resume_line, config)
        recorder = Recorder(run_dir, config.training.log_interval, world(config), to_yaml(config), *begun, resume)
        with recorder, ending_on_error():
            layout, unfinished = _layout(config, run_dir, start), Unfinished()
            # Unfinished checkpoints go before the record is written, and what ranks added to them after these ended.
            with unfinished, Cluster(layout) as cluster, recorder.before_teardown(), unfinished, ending():
                Driver(config, cluster, recorder, start, unfinished).run()


def _layout(config: Config, run_dir: Path, start: Start) -> Layout:
    to_read = weight_bytes(config.text.model_name, start.checkpoint)
    return Layout(
        actors={"vision": config.vision.num_actors, "text": config.text.num_actors},
        collocate=config.cluster.collocate,
        device=config.cluster.device,
        address=chosen_address(config.cluster.address),
        threads=config.cluster.threads_per_actor,
        start_timeout_s=config.cluster.start_timeout_s,
        step_timeout_s=config.cluster.step_timeout_s,
        log_dir=str(run_dir.absolute() / "logs"),
        checkpoint_dir=str(Path(str(config.training.checkpoint_dir)).absolute()),
        degrees={part: asdict(degrees(getattr(config, part))) for part in ("vision", "text")},
        transport=config.cluster.transport,
        trace=config.training.trace,
        needs=needed_paths(config, start.checkpoint),
        build_timeout_s=start_limit_s(config.cluster.start_timeout_s, to_read),
    )


class Driver:
    """One run on a started cluster. Holds refs, never tensors."""

    def __init__(
        self, config: Config, cluster: Cluster, recorder: Recorder, start: Start, unfinished: Unfinished | None = None
    ):
        """unfinished: is told of each checkpoint, while it is written."""
        self.config, self.cluster, self.recorder, self.start = config, cluster, recorder, start
        self._unfinished = unfinished or Unfinished()
        self._micro_batches = micro_batches(config)
        self._timeout_s = config.cluster.step_timeout_s
        self._last_end = time.perf_counter()
        self._skipped = start.skipped_samples

    def run(self) -> None:
        """Start, train every step that is not done yet, save on the way and at the end."""
        self._open_data()
        if self.start.step >= self.steps:
            self.recorder.say(f"nothing is left to train: training.max_steps or num_epochs give {self.steps} steps")
            return
        self._start_parts()
        pending: deque[Pending] = deque()
        self._last_end = time.perf_counter()
        for step in range(self.start.step, self.steps):
            pending.append(self._submit(step))
            if len(pending) > AHEAD:
                self._finish(pending.popleft())
        while pending:
            self._finish(pending.popleft())
        if self.tracing is not None:
            self._write_spans(self._submit_spans())  # of the final checkpoint

    def _open_data(self) -> None:
        """Start the dataset actor, and learn from it how long the run is and whether it continues the one before."""
        config, cluster = self.config, self.cluster
        self.recorder.say(f"starting {cluster.describe()}")
        shape = (self._micro_batches, config.vision.num_actors // config.vision.tensor, config.text.data)
        workers, ahead = config.data.num_workers, config.data.prefetch
        ahead = workers if ahead is None else ahead
        self.data = cluster.dataset_actor(
            make_feed, feed_settings(config), shape=shape, workers=workers, prefetch=ahead
        )
        started_s = config.cluster.start_timeout_s
        wait_all(self.data.take_watched(), started_s)
        self._kept = kept_settings(config) | {"data.samples": self.data.ask("dataset_size", timeout_s=started_s)}
        self.start.check(self._kept)
        self.data.measure(self.start.step, self._timeout_s, self._tell_measuring)
        if self.start.checkpoint is not None:  # before anything is planned
            self.data.ask("load_state", self.start.data, timeout_s=self._timeout_s)
        self.steps = config.training.max_steps
        if self.steps is None:
            self.steps = self.data.ask("steps", config.training.num_epochs, timeout_s=self._timeout_s)
        self.data.end_at(self.steps)
        if self.start.checkpoint is not None:
            self.recorder.say(f"continuing after step {self.start.step} from {self.start.checkpoint}")
        self.data.ask("state", self.start.step, timeout_s=self._timeout_s)  # plans the first steps
        self._keeping_up = KeepingUp(workers, ahead, config.data.balance_window is not None)

    def _tell_measuring(self, done: int, parts: int) -> None:
        if done % max(1, parts // 10) == 0:
            self.recorder.say(f"measuring the samples' lengths: {done * 100 // parts}%")

    def _start_parts(self) -> None:
        config, cluster, groups = self.config, self.cluster, self.cluster.groups
        for part, trainer in (("vision", VisionTrainer), ("text", TextTrainer)):
            settings = part_settings(config, part, cluster.device, self.steps, self.start.checkpoint)
            groups[part].start(trainer, settings)
        wait_all([w for group in groups.values() for w in group.take_watched()], cluster.build_timeout_s)
        self.parts = make_parts(
            groups["vision"], groups["text"], degrees(config.vision), degrees(config.text), self._micro_batches
        )
        self._peak = find_peak(groups, config.cluster.start_timeout_s, self.recorder.say)
        self.schedule = SCHEDULES[config.training.schedule](self._micro_batches)
        self.recomputing = None
        if "auto" in (config.vision.recompute, config.text.recompute):
            self.recomputing = Recomputing(config, groups, cluster.device, self.schedule, self.recorder.say)
        self.tracing = None
        if config.training.trace:
            traced = groups | {"data": self.data}
            writer = self.recorder.open_trace({name: group.size for name, group in traced.items()})
            self.tracing = Tracing(traced, writer, config.cluster.start_timeout_s)
        self.recorder.begin(self.steps)

    def _submit(self, step: int) -> Pending:
        refs = train_step(self.parts, self.schedule, Batch(*self.data.next(step)))
        reading = self.data.take_watched()
        of_parts = [w for part in self.parts.values() for w in part.group.take_watched()]
        spans = None if self.tracing is None else self._submit_spans()
        return Pending(step, refs, reading, reading + of_parts, self._submit_saving(step + 1), spans)

    def _submit_spans(self) -> Spans:
        refs = self.tracing.submit()
        return Spans(refs, [w for group in (*self.cluster.groups.values(), self.data) for w in group.take_watched()])

    def _submit_saving(self, step: int) -> Saving | None:
        """Ask each rank to write what it holds after `step` optimizer steps, if a checkpoint is due then.

        The calls queue behind the step's own, so the next step may be submitted at once and still comes after them.
        """
        every = self.config.training.save_steps
        if step != self.steps and (every is None or step % every):
            return None
        folder = self._unfinished.add(open_checkpoint(Path(str(self.config.training.checkpoint_dir)), step))
        groups = self.cluster.groups
        for name, group in groups.items():
            group.execute_all_async("save", str(folder / name), returns=0)
        return Saving(step, folder, [entry for group in groups.values() for entry in group.take_watched()])

    def _finish(self, pending: Pending) -> None:
        wait_all(pending.reading, self._timeout_s)
        data_ready = time.perf_counter()
        wait_all(pending.watched, self._timeout_s)
        end = time.perf_counter()
        step_s, data_s = end - self._last_end, data_ready - self._last_end
        self._last_end = end
        info: StepInfo = self.cluster.values([pending.refs.info])[0]
        for message in info.skipped[:TOLD]:
            self.recorder.say(f"skipped: {message}")
        if len(info.skipped) > TOLD:
            self.recorder.say(f"skipped: {len(info.skipped) - TOLD} more; `python -m dhp inspect data` lists them")
        self._skipped += len(info.skipped)
        reports = {number: self.cluster.values(refs) for number, refs in pending.refs.reports.items()}
        self.recorder.record(self._metrics(info, reports, step_s, data_s))
        advice = self._keeping_up.add(step_s, data_s, info.data_s, info.measure_s)
        if advice is not None:
            self.recorder.say(advice)
        if self.recomputing is not None:
            self.recomputing.learn({name: reports[number] for name, number in NUMBERS.items()})
        self._write_spans(pending.spans)
        if pending.saving is not None:
            self._finish_saving(pending.saving)
            self._last_end = time.perf_counter()  # writing is no part of the next step's time

    def _write_spans(self, spans: Spans | None) -> None:
        if spans is not None:
            wait_all(spans.watched, self._timeout_s)  # a data worker may die that has no part in the step
            of_ranks = {name: self.cluster.values(refs) for name, refs in spans.refs.items()}
            with self.recorder.writing():
                self.tracing.write(of_ranks)

    def _metrics(
        self, info: StepInfo, reports: dict[int, list[StageReport]], step_s: float, data_s: float
    ) -> StepMetrics:
        shares = [report.loss for report in self.parts[TEXT].leaders(reports[TEXT])]
        by_name = {name: reports[n] for name, n in NUMBERS.items()}
        memory = {name: [r.memory_bytes for r in of if r.memory_bytes is not None] for name, of in by_name.items()}
        return StepMetrics(
            step=info.step + 1,
            epoch=info.done,
            loss=sum(shares) if info.target_tokens else None,
            grad_norm=reports[TEXT][0].grad_norm,
            lr={name: of[0].lr for name, of in by_name.items()},
            tokens=info.tokens,
            target_tokens=info.target_tokens,
            vision_tokens=info.vision_tokens,
            samples=info.samples,
            images=info.images,
            step_s=step_s,
            data_s=data_s,
            tokens_per_s=info.tokens / step_s,
            flops=info.flops,
            mfu=utilisation(info.flops, step_s, self._peak),
            memory_bytes={name: max(peaks) for name, peaks in memory.items()} if all(memory.values()) else None,
            activation_bytes=activation_bytes(by_name),
            comm_bytes={name: _summed(r.sent_bytes for r in of) for name, of in by_name.items()},
            dist_ratio=info.dist_ratio,
            pad_ratio=1.0 - info.tokens / info.places,
            skipped_samples=self._skipped,
        )

    def _finish_saving(self, saving: Saving) -> None:
        """Once every rank has written, give the checkpoint its name."""
        if saving.step == self.steps:
            self.recorder.say("saving the final checkpoint")
        wait_all(saving.watched, self._timeout_s)
        model_name = self.config.text.model_name
        about = {
            "step": saving.step,
            "model_name": model_name,
            "parts": list(self.cluster.groups),
            "skipped_samples": self._skipped,
            "settings": self._kept,
            "data": self.data.ask("state", saving.step, timeout_s=self._timeout_s),
        }
        self.recorder.checkpoint = finish_checkpoint(saving.folder, about, auxiliary_files(model_name))
        self._unfinished.discard(saving.folder)


def _summed(of_ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Bytes by kind, of all ranks together."""
    return dict(sorted(sum(map(Counter, of_ranks), Counter()).items()))
