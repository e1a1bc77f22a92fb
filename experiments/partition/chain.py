"""A chain of devices in this process: a tower and a decoder cut anywhere, and the CPU seconds of all that its ranks do.

Every rank of every stage is here, as a run's actors are elsewhere, and works on one thread, one action at a time. So
seconds of CPU of an action are those of the rank that did it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dhp.config.command_line import compose_config
from dhp.config.parts import model_name
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.core.batch import Batch
from dhp.core.dispatch import PerRank
from dhp.core.graph import Node, StageGraph
from dhp.engine.encoder import EncoderEngine
from dhp.engine.text import TextEngine
from dhp.models.pretrained import config_source
from dhp.planner.units import Unit, layer_cuts
from dhp.step.schedule import Action, Backward, Forward, Schedule, make_programs, make_schedule
from dhp.step.stages import make_stages
from dhp.step.step import train_step
from dhp.step.timed import play
from dhp.trainer.expected_step import expected_step
from dhp.trainer.plan import RunPlan, plan_run
from dhp.trainer.settings import stage_settings
from experiments import baselines  # noqa: F401  it registers profile and layers
from experiments.pair import TEXT, VISION, Here

ENGINES = {VISION: EncoderEngine, TEXT: TextEngine}
SCHEDULE = "1f1b"
STEPS = 1000  # of a run, for its learning rate
Seconds = dict[Action, float]


@dataclass(frozen=True)
class Stages:
    """How many stages each part has and at which of its layers those after the first begin. shared: one device has the
    tower's last stage and the decoder's first."""

    vision: int
    text: int
    vision_cuts: tuple[int, ...]
    text_cuts: tuple[int, ...]
    shared: bool

    @property
    def devices(self) -> int:
        return self.vision + self.text - self.shared


def stages_of(units: Sequence[Unit], cuts: Sequence[int]) -> Stages:
    """Cuts by position in the units of both parts → stages of each."""
    by_part = layer_cuts(units, cuts)
    vision, text = (tuple(by_part.get(part, ())) for part in (VISION, TEXT))
    border = next(at for at, unit in enumerate(units) if unit.part == TEXT)
    return Stages(len(vision) + 1, len(text) + 1, vision, text, border not in cuts)


def plan_chain(model: str, stages: Stages, micro_batches: int, frozen: str = "", *more: str) -> RunPlan:
    """The plan that a run with these stages has. frozen: a part that is not trained, with the projector if it is the
    tower. more: settings as on a command line."""
    held = {VISION: "[vision,projector]", TEXT: "[text]", "": "[]"}[frozen]
    return plan_run(_config(model, stages, micro_batches, f"training.frozen={held}", *more))


def _config(model: str, stages: Stages, micro_batches: int, *more: str) -> Config:
    given = []
    for part in (VISION, TEXT):
        count, cuts = getattr(stages, part), list(getattr(stages, f"{part}_cuts"))
        given += [f"{part}.model_name={model}", f"{part}.parallelism=pipeline", f"{part}.num_actors={count}",
                  f"{part}.pipeline={count}", f"{part}.zero_stage=0", f"{part}.dtype=float32"]  # fmt: skip
        given += [f"{part}.cuts={cuts}"] if cuts else []
    given += [f"training.schedule={SCHEDULE}", f"training.batch_size={micro_batches}", "training.micro_batch_size=1"]
    given += [f"cluster.collocate={str(stages.shared).lower()}", f"cluster.chain={str(stages.shared).lower()}"]
    return resolve(compose_config("tiny", overrides=[*given, "cluster.device=cpu", *more]))


class Chain:
    """All ranks of a plan.

    parameters: of each stage. others: CPU seconds of all else that a stage did in the last step, its update above all.
    """

    def __init__(self, plan: RunPlan, micro_batches: int, schedule: str = SCHEDULE):
        self.graph: StageGraph = plan.graph
        self._seconds: Seconds = {}
        self.others: dict[str, float] = {}
        self._schedule: Schedule = make_schedule(schedule, self.graph, micro_batches)
        self._micro_batches = micro_batches
        self.parameters: dict[str, int] = {}
        groups = {}
        for spec in self.graph.stages:
            engine = ENGINES[spec.part](stage_settings(plan.config, self.graph, spec, "cpu", STEPS, rules=plan.rules))
            self.parameters[spec.name] = sum(parameter.numel() for parameter in engine.model.parameters())
            groups[spec.name] = _Timed(engine, spec.name, self._seconds, self.others)
        self._stages = make_stages(self.graph, groups)

    def step(self, batch: Batch) -> tuple[Seconds, float]:
        """CPU seconds of each action, and the loss."""
        self._seconds.clear()
        self.others.clear()
        reports = train_step(self._stages, self._schedule, self.graph.ties, batch).reports
        (of_last,) = reports[self.graph.stages[-1].name]
        return dict(self._seconds), of_last.loss

    def replay(self, seconds: Mapping[Action, float]) -> float:
        """Seconds of a step on devices of their own: the programs of a run, each action as long as it was here."""
        programs = make_programs(SCHEDULE, self.graph, self._micro_batches)
        return play(programs, self.graph, seconds.__getitem__).step_s

    def replay_alike(self, seconds: Mapping[Action, float]) -> float:
        """The same for micro-batches of one length: each action takes the median of its stage's, so that what else ran
        on this machine meanwhile counts less."""
        found = {key: median(values) for key, values in by_stage(seconds).items()}
        return self.replay({action: found[key_of(action)] for action in seconds})


class _Timed(Here):
    """A stage of one rank that writes down how long its passes take."""

    def __init__(self, engine: Any, stage: str, seconds: Seconds, others: dict[str, float]):
        super().__init__(engine)
        self._stage, self._seconds, self._others = stage, seconds, others

    def execute_all_async(
        self, method: str | Callable[..., Any], *arguments: Any, returns: int | PerRank = 1
    ) -> list[list[Any]]:
        name = method if isinstance(method, str) else method.__name__
        kind = {"forward_step": Forward, "backward_step": Backward}.get(name)
        begin = time.process_time()
        found = super().execute_all_async(method, *arguments, returns=returns)
        took = time.process_time() - begin
        if kind is None:
            self._others[self._stage] = self._others.get(self._stage, 0.0) + took
        else:
            micro_batch, chunk = arguments[:2]
            self._seconds[kind(Node(self._stage, chunk), micro_batch)] = took
        return found


def by_stage(seconds: Mapping[Action, float]) -> dict[tuple[str, bool], list[float]]:
    """The seconds of all micro-batches of a stage, by its name and whether they are backward's."""
    found: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for action, took in seconds.items():
        found[key_of(action)].append(took)
    return found


def key_of(action: Action) -> tuple[str, bool]:
    """Its stage, and whether it is a backward."""
    return action.node.stage, isinstance(action, Backward)


METHODS = ("exact", "bmp", "profile", "layers", "parameters")


@dataclass(frozen=True)
class Asked:
    """Stages of the tower and of the decoder, of which two share a device, and the micro-batches of a step."""

    vision: int
    text: int
    micro_batches: int


CHAINS = (Asked(2, 3, 8), Asked(3, 4, 16), Asked(2, 6, 16))


def chains(every: Sequence[Asked] = CHAINS, methods: Sequence[str] = METHODS) -> Iterator[dict[str, Any]]:
    """A row for each chain and method: layers of each stage, and the step in assumed seconds."""
    for asked in every:
        given = [f"vision.num_actors={asked.vision}", f"vision.pipeline={asked.vision}", "vision.parallelism=pipeline"]
        given += [f"text.num_actors={asked.text}", f"text.pipeline={asked.text}", "text.parallelism=pipeline"]
        given += ["cluster.chain=true", "vision.zero_stage=0", "text.zero_stage=0", "training.schedule=1f1b"]
        given += [f"training.batch_size={asked.micro_batches}", "training.micro_batch_size=1", "cluster.device=cuda"]
        given += ["data.limits.text=null", "data.limits.vision=null"]  # a sample a micro-batch
        for method in methods:
            overrides = [*given, f"text.partition={method}"]
            config = resolve(compose_config("qwen2_5_vl_7b", overrides=overrides))
            plan = plan_run(config, config_source(model_name(config)))
            step = expected_step(plan)
            assert step is not None  # a tower that is known by its patches
            layers = {part: [len(stage.layers) for stage in plan.graph.of_part(part)] for part in (VISION, TEXT)}
            yield {
                "question": "chains", "model": "Qwen2.5-VL 7B", "stages": f"{asked.vision}+{asked.text}",
                "micro_batches": asked.micro_batches, "method": method, **layers, "step_s": round(step.step_s, 3),
                "bubble": round(step.bubble, 3),
            }  # fmt: skip
