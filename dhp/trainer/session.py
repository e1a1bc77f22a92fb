"""Starts and ends a run's cluster, data actors and stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from dhp.batch.prompts import PromptReader
from dhp.batch.reader import BatchReaderSettings, make_reader
from dhp.batch.row_shards import NO_DRAWS
from dhp.checkpoint.folder import check_writable, remove_unfinished
from dhp.checkpoint.resume import LAYOUT, RECIPE, Start, find_start
from dhp.cluster.address import chosen_address
from dhp.cluster.cluster import ActorGroup, Cluster, ClusterSpec
from dhp.cluster.data_actor import DatasetActor
from dhp.cluster.gpus import least_memory, read_gpus
from dhp.cluster.hangs.watch import Watched, wait_all
from dhp.cluster.transport.shared_memory import RemoteValue
from dhp.config.parts import DECODER, model_name, parts
from dhp.config.resolve import collective_timeout_s
from dhp.config.run_dir import make_run_dir, replaces_checkpoints, run_directory
from dhp.config.schema import Config
from dhp.config.steps import micro_batches
from dhp.core.batch import Batch, StepData, StepInfo
from dhp.core.graph import StageGraph
from dhp.core.locks import fenced
from dhp.core.process import interruptible, say_nothing
from dhp.data.balance.packs import Loads
from dhp.engine.engines import make_rank
from dhp.engine.stage_settings import StageSettings
from dhp.models.empty import start_limit_s, weight_bytes
from dhp.plan.batches import LOOKED_AT, LOOKING_S, feed_settings, may_be_unreached, passes_of, unreached
from dhp.plan.run_plan import RunPlan, find_localities
from dhp.step.stages import EngineProtocol, Stages, make_stages
from dhp.supervise.attempt import known_device, restarts, this_attempt
from dhp.trainer.dry_run import require_room
from dhp.trainer.preflight import feature_settings, keep_settings, reference_digest
from dhp.trainer.settings import (
    check_rates,
    check_recipe,
    fixed_settings,
    free_layout,
    held_files,
    needed_paths,
    rates,
    recipe,
    stage_settings,
)

Work = Mapping[str, Sequence[Sequence[Any]]]  # refs by part, [micro-batch][shard]


def look_ahead(groups: Mapping[str, ActorGroup], graph: StageGraph, work: Work) -> frozenset[Any]:
    """Let each rank of an encoder fetch its shard's work of all micro-batches; the refs that are fetched. The
    decoder's work is small: what is large of it comes from the encoders."""
    fetched: set[Any] = set()
    for stage in graph.stages:
        name, tensor = graph.work_of(stage), stage.degrees.tensor
        if stage.part == DECODER or name not in work:
            continue
        shards = [[micro_batch[shard] for micro_batch in work[name]] for shard in range(stage.degrees.shards)]
        groups[stage.name].look_ahead([own for own in shards for _ in range(tensor)])
        fetched |= {ref for own in shards for ref in own}
    return frozenset(fetched)


def named_elsewhere(work: Work, fetched: frozenset[Any]) -> dict[str, list[list[Any]]]:
    """The work, in which what ranks have fetched themselves is referred to by `RemoteValue`, not sent once more."""
    return {
        part: [[RemoteValue(ref) if ref in fetched else ref for ref in shards] for shards in micro_batches]
        for part, micro_batches in work.items()
    }


@dataclass(frozen=True)
class DataPlan:
    """The run's plan from its data. steps: of the whole run; epoch_ends: steps after which training.save_epochs
    asks for a checkpoint; kept: settings that a checkpoint must agree with;
    workers and ahead: processes that read, and steps that are read ahead."""

    steps: int
    epoch_ends: frozenset[int]
    kept: dict[str, Any]
    workers: int
    ahead: int


class Session:
    """A run's actors, from the moment it is entered until it is left."""

    data: DatasetActor
    stages: Stages

    def __init__(self, plan: RunPlan, run_dir: Path, start: Start, say: Callable[[str], None] = say_nothing):
        """say: what is being started."""
        self.plan, self.config, self.graph, self.start, self._say = plan, plan.config, plan.graph, start, say
        self._cluster = Cluster(_layout(plan.config, plan.graph, run_dir, start), say)
        self._timeout_s = plan.config.cluster.step_timeout_s
        self._held: frozenset[Any] = frozenset()  # refs of the next step's work that ranks fetch during this one

    def __enter__(self) -> Session:
        self._cluster.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._cluster.__exit__(*error)

    @property
    def groups(self) -> dict[str, ActorGroup]:
        """The actors of each stage."""
        return self._cluster.groups

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return self._cluster.device

    @property
    def node_devices(self) -> int:
        """Devices of the node that has most of the run's."""
        found = {device for of_stage in self._cluster.devices.values() for device in of_stage}
        nodes = [device.node for device in found]
        return max(map(nodes.count, nodes))

    @property
    def threads(self) -> int:
        """CPU threads of an actor."""
        return self._cluster.threads

    def say(self, line: str) -> None:
        """Tell what is being done."""
        self._say(line)

    def leave_adapters_out(self, out: bool) -> None:
        """Whether all stages evaluate without their adapters from here on."""
        for group in self.groups.values():
            group.execute_all("leave_adapters_out", out, timeout_s=self._timeout_s)

    def describe(self) -> str:
        """One line: how many actors of each stage, where."""
        return self._cluster.describe()

    def describe_loading(self) -> str:
        """One line: what `start_stages` reads."""
        stages = len(self.graph.stages)
        read = weight_bytes(model_name(self.config), self.start.checkpoint)
        size = f"{read / 10**9:.1f} GB" if read >= 10**9 else f"{read / 10**6:.0f} MB"
        weights = f"{size} of weights" if read else "weights"
        return f"loading {weights} into {stages} stage{'s' if stages > 1 else ''}"

    def open_data(self, tell: Callable[[int, int], None]) -> DataPlan:
        """Start the actors that read, and learn how long the run is and whether it continues the one before.

        tell: is called with parts of the datasets whose lengths are measured, done and all. Raises what reading raises,
        and CheckpointError where the run does not continue its checkpoint."""
        config, start = self.config, self.start
        workers, ahead = config.data.num_workers, config.data.prefetch
        ahead = workers if ahead is None else ahead
        reading = {"workers": workers, "prefetch": ahead}
        if config.data.cache_features is not None:
            self._say(f"reading the weights that data.cache_features={config.data.cache_features} goes by")
        features = feature_settings(config)
        near = find_localities(self.graph, self._cluster.devices, config.data.locality_slack)
        feed = feed_settings(config, near, passes_of(self.plan.counted), features)
        feed = replace(feed, reference=reference_digest(config))
        self.data = self._cluster.dataset_actor(make_reader, feed, micro_batches=micro_batches(config), **reading)
        started_s = config.cluster.start_timeout_s
        self._say(f"starting the dataset actor; it reads the annotations of {', '.join(config.data.datasets)}")
        wait_all(self.data.take_watched(), started_s)
        kept = fixed_settings(config) | {"data.samples": self.data.ask("dataset_size", timeout_s=started_s)}
        files = held_files(config)
        start.check(kept | {key: value for key, value in files.items() if key in start.settings})
        self.data.measure(start.step, self._timeout_s, tell)
        self._name_limits()
        if start.checkpoint is not None:  # before anything is planned
            self.data.ask("load_state", start.data, timeout_s=self._timeout_s)
        steps = config.training.max_steps
        if steps is None:
            steps = self.data.ask("steps", config.training.num_epochs, timeout_s=self._timeout_s)
        check_rates(config, start, steps)
        kept |= files | {RECIPE: recipe(config) | rates(config, steps), LAYOUT: free_layout(config)}
        self.data.end_at(steps)
        return DataPlan(steps, frozenset(self._epoch_ends(steps)), kept, workers, ahead)

    def _name_limits(self) -> None:
        if may_be_unreached(self.config):
            columns = self.data.ask("some_lengths", LOOKED_AT, LOOKING_S, timeout_s=self._timeout_s)
            usable = columns[columns["text"] > 0]
            for line in unreached(self.config, Loads(usable["vision"], usable["text"])) if len(usable) else ():
                self._say(line)

    def _epoch_ends(self, steps: int) -> Iterator[int]:
        """Steps before the run's last that end every so many-th epoch, as training.save_epochs says."""
        every = self.config.training.save_epochs
        for epoch in count(every, every) if every else ():
            end = self.data.ask("steps", epoch, timeout_s=self._timeout_s)
            if end >= steps:
                return
            yield end

    def start_stages(self, steps: int, states: bool = True, again: bool = False) -> None:
        """Load every stage on its actors, for a run of that many steps. states: a checkpoint's optimizer states too.
        again: in the place of what they have."""
        if self.device == "cuda":
            require_room(self.plan, least_memory(read_gpus()))
        make: Callable[[StageSettings], EngineProtocol] = make_rank  # every kind of rank has the methods of the step
        kept = keep_settings(self.config, self.graph)
        for spec in self.graph.stages:
            given = (self.start.checkpoint, self.plan.rules, kept.get(spec.part), states)
            settings = stage_settings(self.config, self.graph, spec, self.device, steps, *given)
            group = self.groups[spec.name]
            (group.build if again else group.start)(make, settings)
        if not again:
            self._cluster.link()
        wait_all(self.take_watched(), self._cluster.build_timeout_s)
        self.stages = make_stages(self.graph, self.groups, self._cluster.linked)

    def feed_settings(self, config: Config) -> BatchReaderSettings:
        """Settings of what reads for these stages as `config` says."""
        return feed_settings(config, find_localities(self.graph, self._cluster.devices, config.data.locality_slack))

    def put(self, data: StepData) -> Batch:
        """Data that were sharded here, as refs for the ranks."""
        put = self._cluster.put
        work = {part: [list(map(put, shards)) for shards in of_part] for part, of_part in data.work.items()}
        return Batch(put(data.info), work, data.routes)

    def open_reader(self, config: Config, exchange: str = "", refers: bool = True) -> DatasetActor:
        """Start the actors that read other data than the run's, as `config` says; once they have opened it. exchange:
        see `dhp.batch.reader.BatchReaderSettings`. refers: preferences come with the reference's log-probabilities."""
        settings = self.feed_settings(config)
        division = replace(settings.division, draws=NO_DRAWS)  # without training nothing draws
        reference = reference_digest(config) if refers else ""
        settings = replace(settings, exchange=exchange, division=division, reference=reference)
        actor = self._cluster.dataset_actor(
            make_reader,
            settings,
            micro_batches=micro_batches(config),
            workers=config.data.num_workers,
            prefetch=max(1, config.data.num_workers),
        )
        wait_all(actor.take_watched(), config.cluster.start_timeout_s)
        return actor

    def open_prompts(self, make: Callable[..., PromptReader], config: Config, *more: Any) -> DatasetActor:
        """Start an actor that reads prompts, as `make` of the settings of `config` and `more` gives them;
        once it has them."""
        actor = self._cluster.dataset_actor(make, self.feed_settings(config), *more, micro_batches=1)
        wait_all(actor.take_watched(), config.cluster.start_timeout_s)
        return actor

    def take_batch(self, step: int) -> Batch:
        """The data of a step that was requested and has been read. Where `data.pin_memory` says so, the encoders' ranks
        begin to fetch the next step's during this one."""
        batch = self.data.take(step)
        if not (self.config.data.pin_memory and self.device == "cuda"):
            return batch
        held, self._held = self._held, look_ahead(self.groups, self.graph, self.data.coming(step + 1))
        return replace(batch, work=named_elsewhere(batch.work, held))

    def take_watched(self) -> list[Watched]:
        """Calls of all stages that were submitted since the last time."""
        return [entry for group in self.groups.values() for entry in group.take_watched()]

    def data_state(self, step: int) -> Any:
        """The state of the data's order for a checkpoint after `step` steps."""
        return self.data.ask("state", step, timeout_s=self._timeout_s)

    def devices_available(self) -> int:
        """Devices that the run could have now."""
        return self._cluster.devices_available()

    def info(self, ref: Any) -> StepInfo:
        """The counts of a step that is done."""
        return self.values([ref])[0]

    def values(self, refs: Sequence[Any]) -> list[Any]:
        """The values behind refs of finished calls."""
        return self._cluster.values(refs)


def _layout(config: Config, graph: StageGraph, run_dir: Path, start: Start) -> ClusterSpec:
    to_read = weight_bytes(model_name(config), start.checkpoint)
    elastic = bool(config.training.elastic) and this_attempt() is not None  # a run that trains, and goes on by itself
    return ClusterSpec(
        graph=graph,
        device=known_device() or config.cluster.device,
        address=chosen_address(config.cluster.address),
        threads=config.cluster.threads_per_actor,
        start_timeout_s=config.cluster.start_timeout_s,
        step_timeout_s=config.cluster.step_timeout_s,
        log_dir=str(run_dir.absolute() / "logs"),
        checkpoint_dir=str(Path(str(config.training.checkpoint_dir)).absolute()),
        transport=config.cluster.transport,
        trace=bool(config.training.trace),
        check_collectives=config.cluster.check_collectives,
        collective_timeout_s=collective_timeout_s(config.cluster),
        saving_s=0.0 if config.training.save_in_background else config.training.save_timeout_s,
        steps_done=start.step,
        needs=needed_paths(config, start.checkpoint),
        build_timeout_s=start_limit_s(config.cluster.start_timeout_s, to_read),
        elastic=elastic,
        reserve_s=config.training.elastic_wait_s if elastic and restarts() else None,
        restarted=restarts() > 0,
    )


@contextmanager
def open_run(config: Config, say: Callable[[str], None]) -> Iterator[tuple[Path, Start]]:
    """Hold the run's directory, made anew or continued: the directory, and the checkpoint that it starts from. Signals
    raise KeyboardInterrupt meanwhile. Raises ConfigError and CheckpointError."""
    checkpoint_dir = Path(str(config.training.checkpoint_dir))
    with interruptible(), run_directory(config, say) as run_dir:
        start = find_start(config.training.resume, checkpoint_dir, replaces_checkpoints(config), say)
        start.check(fixed_settings(config), list(parts(config)))
        check_recipe(config, start)
        make_run_dir(config)
        check_writable(checkpoint_dir)
        for line in [*start.quarantine(), *start.changes(recipe(config), free_layout(config))]:
            say(line)
        with fenced(checkpoint_dir):
            remove_unfinished(checkpoint_dir)
            yield run_dir, start
