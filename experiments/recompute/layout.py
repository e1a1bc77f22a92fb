"""Both parts of a layout, here in this process or as actors, and steps of one batch under plan after plan."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from dhp.cluster.cluster import Cluster
from dhp.cluster.cluster import ClusterSpec as Actors
from dhp.cluster.hangs.watch import wait_all
from dhp.core.axes import Degrees
from dhp.core.batch import StepData
from dhp.core.graph import StageGraph
from dhp.core.reports import StageUsage
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.stage_settings import OptimizerSettings, StageSettings
from dhp.engine.text_engine import TextEngine
from dhp.models.registry import load_family
from dhp.plan.count.costs import Arrangement, Plan, arrange
from dhp.plan.recompute.planner import Planner
from dhp.plan.recompute.profile import usage_of
from dhp.step.schedule import make_schedule
from dhp.step.stages import RankGroup, make_stages
from dhp.step.step import train_step
from experiments.pair import TEXT, VISION, Here, as_batch, join_alone, pair_of, settings_of

TIMEOUT_S = 900.0
TRAINERS = {VISION: EncoderEngine, TEXT: TextEngine}
UPDATE = OptimizerSettings(1e-4, (0.9, 0.999), 1e-8, 0.01, "constant", 0, 10**6, 1.0)
Usages = dict[str, StageUsage | None]


@dataclass(frozen=True)
class Layout:
    """How both parts are split, and how they take turns."""

    vision: Degrees = Degrees()
    text: Degrees = Degrees()
    zero_stage: int = 0
    dtype: str = "float32"
    schedule: str = "sequential"
    micro_batches: int = 1
    collocate: bool = True
    packing: bool = True

    def graph(self, model: str) -> StageGraph:
        """Both stages."""
        return pair_of(load_family(model), self.vision, self.text, self.collocate)

    def settings(self, stage: str, model: str) -> StageSettings:
        """Of one stage: everything recomputed at first, and measured."""
        own = {"dtype": self.dtype, "zero_stage": self.zero_stage, "packing": self.packing}
        return settings_of(self.graph(model), stage, model, UPDATE, "full", measure=True, **own)


@contextmanager
def in_this_process(layout: Layout, model: str) -> Iterator[Run]:
    """One rank of each part, without actors."""
    with join_alone():
        groups = {stage: Here(trainer(layout.settings(stage, model))) for stage, trainer in TRAINERS.items()}
        yield Run(layout, model, groups)


@contextmanager
def as_actors(layout: Layout, model: str) -> Iterator[Run]:
    """All ranks of both parts, on a Ray of their own."""
    with tempfile.TemporaryDirectory() as folder:
        actors = Actors(
            graph=layout.graph(model),
            device="cpu",
            address="local",
            threads=max(1, (os.cpu_count() or 1) // layout.vision.world),
            start_timeout_s=TIMEOUT_S,
            step_timeout_s=TIMEOUT_S,
            log_dir=folder,
            checkpoint_dir=folder,
        )
        with Cluster(actors) as cluster:
            for stage, trainer in TRAINERS.items():
                cluster.groups[stage].start(trainer, layout.settings(stage, model))
            groups = list(cluster.groups.values())

            def values(refs: Any) -> Any:
                wait_all([watched for group in groups for watched in group.take_watched()], TIMEOUT_S)
                return ray.get(refs)

            values([])
            yield Run(layout, model, cluster.groups, ray.put, values)


def _same(value: Any) -> Any:
    return value


class Run:
    """Steps of a started layout. kinds: of the layers of each part."""

    def __init__(
        self,
        layout: Layout,
        model: str,
        groups: Mapping[str, RankGroup],
        put: Callable[[Any], Any] = _same,
        values: Callable[[Any], Any] = _same,
    ):
        """put: a value → what groups are called with; values: what they answer → values, when all is done."""
        self._groups, self._put, self._values = groups, put, values
        self._graph = layout.graph(model)
        self._stages = make_stages(self._graph, groups)
        self._schedule = make_schedule(layout.schedule, self._graph, layout.micro_batches)
        family = load_family(model)
        self.kinds = {VISION: family.tower.layers.kinds, TEXT: family.decoder.layers.kinds}
        self.arrangement: Arrangement = arrange(self._graph, self._schedule, "cpu")

    def take(self, data: StepData) -> None:
        """The batch of the steps to come."""
        self._batch = as_batch(data, self._put)

    def step(self, plan: Plan) -> Usages:
        """One step under the plan; what its fullest ranks took."""
        for stage, group in self._groups.items():
            group.execute_all_async("set_recompute", plan[stage], returns=0)
        reports = train_step(self._stages, self._schedule, self._graph.ties, self._batch).reports
        return {stage: usage_of(self._values(refs)) for stage, refs in reports.items()}

    def everything(self, choice: str) -> Plan:
        """The plan in which all layers recompute the same."""
        return {stage: (choice,) * len(kinds) for stage, kinds in self.kinds.items()}

    def settle(self, planner: Planner) -> None:
        """Steps until the planner has a plan, which has not been tried yet."""
        while not planner.settled:
            planner.learn(self.step(planner.asked))
