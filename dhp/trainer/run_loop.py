"""A started run for custom loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from dhp.checkpoint.folder import Unfinished, find_checkpoint
from dhp.checkpoint.resume import OPTIMIZER, read_start
from dhp.cluster.hangs.watch import wait_all
from dhp.config.command_line import compose_config, job_overrides, to_yaml
from dhp.config.parts import parts
from dhp.config.schema import Config
from dhp.config.steps import micro_batches
from dhp.config.yaml_files import named_file
from dhp.core.batch import Batch, StepInfo
from dhp.core.errors import ConfigError, Diverged
from dhp.core.files import write_whole
from dhp.core.graph import StageGraph
from dhp.core.process import count_cores, ending, say_nothing
from dhp.core.reports import StageReport
from dhp.plan.bench.machine import CPU
from dhp.plan.run_plan import plan_run
from dhp.plan.search.free_keys import PASSES
from dhp.step.stages import Ref, Stage
from dhp.step.step import update_weights
from dhp.trainer.planned_layout import with_layout
from dhp.trainer.preflight import prepare
from dhp.trainer.preload import preloaded
from dhp.trainer.references import find_references
from dhp.trainer.saving import Saver
from dhp.trainer.session import Session, open_run
from dhp.trainer.settings import fixed_settings
from dhp.trainer.token_calls import TokenCalls, call
from dhp.trainer.trainer import ADVICE, NonfiniteCount


def load_config(source: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a YAML file, or of a name as `--config-name` takes it, with overrides of the command line.

    >>> load_config("tiny", ["training.max_steps=3"])

    Raises ConfigError for an unknown name or key, and for a value of the wrong type."""
    (name, folder), rest = named_file([source], None, None)
    return compose_config(rest[0] if rest else name, folder, overrides)


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. loss: of the whole batch, the mean over its weighted target tokens. grad_norm: of all
    gradients, before clipping. reports: of each rank, by stage. finite: whether both are; if not, nothing was
    updated."""

    loss: float
    grad_norm: float
    reports: Mapping[str, list[StageReport]]
    finite: bool = True


class Run(TokenCalls):
    """A run's actors, from entering to leaving: a group for each stage of each part, and those that read the data.

    It trains nothing by itself. Each call submits work and returns refs at once; `wait` waits. Raises DhpError when
    it is entered or a call fails, and leaves no process. Of training.* it takes what says how steps and weights are
    made (batch size, rates, trainable, resume …); saving, evaluation and the schedule are the loop's own."""

    def __init__(self, config: Config, say: Callable[[str], None] = say_nothing) -> None:
        """config: as `load_config` gives it. say: receives a line when something slow begins."""
        super().__init__()
        self.config, self._say = config, say

    def __enter__(self) -> Run:
        with ExitStack() as exits:
            exits.enter_context(preloaded(self.config))
            passes = f"{PASSES}={self.config.training.vision_batch or 'null'}"  # the loop's own
            planned = with_layout(self.config, self._say, [*job_overrides(), passes])
            self.config = config = prepare(planned, say=self._say)
            run_dir, start = exits.enter_context(open_run(config, self._say))
            write_whole(run_dir / "config.yaml", to_yaml(config))
            (run_dir / "metrics.jsonl").touch()  # a run's record, by which overwrite=true knows it
            unfinished = exits.enter_context(Unfinished())
            self._session = exits.enter_context(Session(plan_run(config), run_dir, start, self._say))
            exits.enter_context(ending())
            self._plan = self._session.open_data(lambda done, parts: None)
            self._session.start_stages(self._plan.steps)
            find_references(self._session)
            self.step = start.step
            self._saver = Saver(self._session, self._say, unfinished)
            self._nonfinite = NonfiniteCount(config.training.max_nonfinite_steps)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._ended = "the run is over, as its `with` block was left. Begin another one"
        self._exits.__exit__(*error)

    @property
    def stages(self) -> Mapping[str, Stage]:
        """The stages by name, in the order of the forward pass: vision, text; of a pipeline text.0, text.1 …"""
        return self._session.stages

    @property
    def graph(self) -> StageGraph:
        """The stages and what goes from one to another."""
        return self._session.graph

    @property
    def crowded(self) -> bool:
        """Whether actors on CPUs share cores, so that seconds of a step say nothing of how they go on together."""
        session = self._session
        actors = sum(stage.degrees.world for stage in session.graph.stages) / session.graph.device_count()
        return session.device == CPU and actors * session.node_devices * session.threads > count_cores()

    @property
    def steps(self) -> range:
        """The steps that are to be made: from the resumed checkpoint's on, up to max_steps or num_epochs."""
        return range(self._session.start.step, self._plan.steps)

    @property
    def micro_batches(self) -> range:
        """Those of a step."""
        return range(micro_batches(self.config))

    @call
    def read(self, step: int) -> Batch:
        """The data of a step, each rank's own, as refs; once they have been read."""
        wait_all(self._session.data.request(step), self.config.cluster.step_timeout_s)
        return self._session.take_batch(step)

    @call
    def update(self, batch: Batch) -> dict[str, list[Ref]]:
        """Submit the norm of all gradients, and each stage's optimizer step clipped by it: reports by stage."""
        return update_weights(dict(self.stages), self._session.graph.ties, batch).reports

    @call
    def wait(self, refs: Mapping[str, list[Ref]]) -> StepResult:
        """Wait until all that was submitted is done. refs: as `update` returns them. Raises the first failure of any
        rank."""
        wait_all(self._session.take_watched(), self.config.cluster.step_timeout_s)
        reports = {name: self._session.values(of_stage) for name, of_stage in refs.items()}
        shares = [one.loss for name, of in reports.items() for one in self.stages[name].leaders(of)]
        self._nonfinite.add(reports)
        first = next(iter(reports.values()))[0]
        if self._nonfinite.too_many:
            raise Diverged(
                f"the gradient norm is {first.grad_norm}, and training.max_nonfinite_steps="
                f"{self.config.training.max_nonfinite_steps} end the run. {ADVICE}"
            )
        return StepResult(sum(share for share in shares if share is not None), first.grad_norm, reports, first.finite)

    @call
    def optim_step(self) -> StepResult:
        """The optimizer step of what `forward_backward` has added up, clipped by the norm of all gradients; waits for
        it. Raises as `wait`, and ConfigError behind the last step that the learning rate is made for."""
        if self.step >= self._plan.steps:
            raise ConfigError(
                f"optim_step was called after step {self.step}, the run's last one (training.max_steps, num_epochs): "
                "behind it there is no learning rate. Set training.max_steps to the steps of the loop"
            )
        batch, loss = self._take_unstepped()
        result = self.wait(self.update(batch))
        self.step += 1
        return replace(result, loss=loss)

    def counts(self, batch: Batch) -> StepInfo:
        """The samples, tokens and useful operations of a batch."""
        return self._session.info(batch.info)

    @call
    def save(self, step: int) -> Path:
        """Write a checkpoint after `step` steps, from which `training.resume` continues; its path. Raises
        CheckpointError where there is one already, which is never written over, or where it cannot be written."""
        if not isinstance(step, Integral) or step < 0:
            raise ConfigError(f"a checkpoint is saved after so many steps, 0 or more, and not after {step!r}")
        return self._saver.save(step, self._plan, self._session.start.skipped_samples)

    @call
    def load(self, checkpoint: str | Path) -> None:
        """Have all ranks go on from a checkpoint, or from a run's newest one, with its weights, optimizer states and
        number of steps, in the place of theirs; gradients are dropped. Raises CheckpointError where it is damaged, or
        trains other weights."""
        session, start = self._session, read_start(find_checkpoint(Path(checkpoint)), self._say)
        now = fixed_settings(session.config)
        start.check(
            {key: now[key] for key in ("training.trainable", "training.frozen", OPTIMIZER, "lora")},
            [*parts(session.config)],
        )
        self._unstepped.clear()
        session.start = start
        self._ended = f"the run cannot go on: {checkpoint} was loaded in part. Leave its `with` block"
        session.start_stages(self._plan.steps, again=True)
        self.step, self._ended = start.step, ""
