"""A chain of devices in this process, cut anywhere: replayed steps of its ranks, and real ones.

Every rank of every stage is here, as a run's actors are elsewhere, and works on one thread, one action at a time. So
seconds of CPU of an action are those of the rank that did it."""

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.core.axes import Degrees
from dhp.core.batch import Batch, StepData
from dhp.core.graph import StageGraph
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.stage_settings import StageSettings
from dhp.engine.text_engine import TextEngine
from dhp.plan.cut.bmp import bmp, by_layers, by_parameters
from dhp.plan.cut.exact import exact
from dhp.plan.cut.partition import pipeline_programs
from dhp.plan.cut.problem import PartitionProblem
from dhp.plan.cut.units import Unit, layer_cuts
from dhp.plan.run_plan import RunPlan, plan_run
from dhp.step.schedule import Action, Backward, Schedule, make_programs, make_schedule
from dhp.step.stages import make_stages
from dhp.step.step import train_step
from dhp.step.timed import play
from dhp.trainer.settings import stage_settings
from experiments.pair import TEXT, VISION, TimedHere, as_batch, join_alone, keep_freed_memory
from experiments.partition.published import at
from experiments.small import deal, make_samples, save_even_model, started, timed

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
        self.others: dict[str, float] = {}
        self._schedule: Schedule = make_schedule(schedule, self.graph, micro_batches)
        self._micro_batches = micro_batches
        self.parameters: dict[str, int] = {}
        self._groups: dict[str, TimedHere] = {}
        for spec in self.graph.stages:
            engine = ENGINES[spec.part](stage_settings(plan.config, self.graph, spec, "cpu", STEPS, rules=plan.rules))
            self.parameters[spec.name] = sum(parameter.numel() for parameter in engine.model.parameters())
            self._groups[spec.name] = TimedHere(spec.name, engine)
        self._stages = make_stages(self.graph, self._groups)

    def step(self, batch: Batch) -> tuple[Seconds, float]:
        """CPU seconds of each action, and the loss."""
        for group in self._groups.values():
            group.begin()
        reports = train_step(self._stages, self._schedule, self.graph.ties, batch).reports
        (of_last,) = reports[self.graph.stages[-1].name]
        self.others = {name: group.others[0] for name, group in self._groups.items()}
        found = {action: took for group in self._groups.values() for (action, _), took in group.seconds.items()}
        return found, of_last.loss

    def replay(self, seconds: Mapping[Action, float]) -> float:
        """Seconds of a step on devices of their own: the programs of a run, each action as long as it was here."""
        programs = make_programs(SCHEDULE, self.graph, self._micro_batches)
        return play(programs, self.graph, seconds.__getitem__).step_s

    def replay_alike(self, seconds: Mapping[Action, float]) -> float:
        """The same for micro-batches of one length: each action takes the median of its stage's, so that what else ran
        on this machine meanwhile counts less."""
        found = {key: median(values) for key, values in by_stage(seconds).items()}
        return self.replay({action: found[key_of(action)] for action in seconds})


def by_stage(seconds: Mapping[Action, float]) -> dict[tuple[str, bool], list[float]]:
    """The seconds of all micro-batches of a stage, by its name and whether they are backward's."""
    found: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for action, took in seconds.items():
        found[key_of(action)].append(took)
    return found


def key_of(action: Action) -> tuple[str, bool]:
    """Its stage, and whether it is a backward."""
    return action.node.stage, isinstance(action, Backward)


EQUAL = 1e-4  # of losses of the first step, relative
VALUE_BYTES = 4


@dataclass(frozen=True)
class Shape:
    """A model and what a micro-batch of it is: one sample with a picture of side × side patches, and words."""

    tower: int = 224
    tower_layers: int = 11
    decoder: int = 384
    decoder_layers: int = 14
    side: int = 16
    words: int = 8


SHAPE = Shape()


@dataclass(frozen=True)
class Setting:
    """A chain. frozen: the part that is not trained."""

    stages: int = 4
    micro_batches: int = 16
    frozen: str = ""


SETTINGS = (Setting(), Setting(frozen=VISION), Setting(frozen=TEXT))


def replayed(rounds: int, shape: Shape = SHAPE, settings: Sequence[Setting] = SETTINGS) -> Iterator[dict[str, Any]]:
    """A row for each setting and method."""
    torch.set_num_threads(1)  # so that this process's seconds of CPU are those of the rank that works
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder, join_alone():
        model = save_even_model(Path(folder), shape.tower, shape.decoder, shape.decoder_layers, shape.tower_layers)
        for setting in settings:
            yield from _of_setting(model, shape, setting, rounds)


def _of_setting(model: str, shape: Shape, setting: Setting, rounds: int) -> Iterator[dict[str, Any]]:
    batch = _batch(model, shape, setting.micro_batches)
    units = measure_units(model, shape, setting.frozen, batch)
    problem = PartitionProblem(units, pipeline_programs(SCHEDULE, setting.stages, 1, setting.micro_batches))
    cuts = cuts_of(problem)
    times = run_in_turn(model, setting, {own: stages_of(units, own) for own in cuts.values()}, batch, rounds)
    work = [unit.forward_s + unit.backward_s for unit in units]
    tower = sum(own for own, unit in zip(work, units, strict=True) if unit.part == VISION) / sum(work)
    for method, own in cuts.items():
        steps = times[own]
        yield {
            "question": "replay", "stages": setting.stages, "micro_batches": setting.micro_batches,
            "frozen": setting.frozen or "nothing", "method": method, "cuts": list(own),
            "layers": [b - a for a, b in zip([0, *own], [*own, len(units)])],
            "step_s": round(median(steps), 4), "planned_s": round(at(problem, own), 4),
            "to_exact": round(_ratio(steps, times[cuts["exact"]]), 4),
            "speed_to_parameters": round(_ratio(times[cuts["parameters"]], steps), 4),
            "tower_share": round(tower, 3), "rounds": rounds,
        }  # fmt: skip


def cuts_of(problem: PartitionProblem) -> dict[str, tuple[int, ...]]:
    """By method, cuts by position."""
    return {
        "parameters": by_parameters(problem.units, problem.runs), "layers": by_layers(problem.units, problem.runs),
        "bmp by forward": bmp(problem).cuts, "bmp by work": bmp(problem, by="work").cuts, "exact": exact(problem).cuts,
    }  # fmt: skip


def measure_units(model: str, shape: Shape, frozen: str, batch: Batch, steps: int = 3) -> tuple[Unit, ...]:
    """A unit for each layer, the first and the last of a part with what is around them. Seconds are medians over the
    micro-batches of all steps but the first."""
    counts = {VISION: shape.tower_layers, TEXT: shape.decoder_layers}
    each = Stages(*counts.values(), *(tuple(range(1, count)) for count in counts.values()), shared=False)
    micro_batches = len(batch.work[TEXT])
    chain = Chain(plan_chain(model, each, micro_batches, frozen), micro_batches, "sequential")
    taken = [by_stage(chain.step(batch)[0]) for _ in range(steps)][1:]
    found = {key: median(took for step in taken for took in step[key]) for key in taken[0]}
    hidden = {VISION: VALUE_BYTES * shape.tower * shape.side**2}
    hidden[TEXT] = VALUE_BYTES * shape.decoder * (1 + shape.side**2 // 4 + shape.words)
    units = []
    for spec in chain.graph.stages:
        merged = spec.part == VISION and spec is chain.graph.of_part(VISION)[-1]
        output = VALUE_BYTES * shape.decoder * shape.side**2 // 4 if merged else hidden[spec.part]
        back = found.get((spec.name, True), 0.0)
        size = chain.parameters[spec.name]
        units.append(Unit(spec.name, spec.part, 1, found[spec.name, False], back, size, output_bytes=output,
                          trains=spec.trains))  # fmt: skip
    return tuple(units)


def run_in_turn(
    model: str, setting: Setting, stages: Mapping[tuple[int, ...], Stages], batch: Batch, rounds: int
) -> dict[tuple[int, ...], list[float]]:
    """By cuts, replayed seconds of a step in each round, after one that does not count. Raises AssertionError where
    they have not done the same work."""
    chains = {}
    for cuts, own in stages.items():
        chains[cuts] = Chain(plan_chain(model, own, setting.micro_batches, setting.frozen), setting.micro_batches)
        assert chains[cuts].graph.device_count() == own.devices == setting.stages
    losses = [chain.step(batch)[1] for chain in chains.values()]
    if max(losses) - min(losses) > EQUAL * max(losses):
        raise AssertionError(f"losses of the same step differ: {losses}")
    times: dict[tuple[int, ...], list[float]] = {cuts: [] for cuts in chains}
    for _ in range(rounds):
        for cuts, chain in chains.items():
            times[cuts].append(chain.replay_alike(chain.step(batch)[0]))
    return times


def _batch(model: str, shape: Shape, micro_batches: int) -> Batch:
    samples = make_samples(micro_batches, shape.side, shape.words)
    return as_batch(deal(model, Degrees(), Degrees(), samples, micro_batches))


def _ratio(of: Sequence[float], to: Sequence[float]) -> float:
    return median(a / b for a, b in zip(of, to, strict=True))


MICRO_BATCHES = 8


class _OnItsCore:
    """A rank that works on the core of its device, as ranks of a GPU do: actors of one device take turns."""

    def __init__(self, settings: StageSettings):
        cores = sorted(os.sched_getaffinity(0))
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {cores[min(settings.spec.devices) % len(cores)]})
        super().__init__(settings)  # type: ignore[call-arg]  # of the engine behind it


class _Encoder(_OnItsCore, EncoderEngine):
    """Of a tower."""


class _Text(_OnItsCore, TextEngine):
    """Of a decoder."""


PINNED = {VISION: _Encoder, TEXT: _Text}


def walls(rounds: int, shape: Shape = SHAPE, steps: int = 4) -> Iterator[dict[str, Any]]:
    """A row for each cut that a method finds. steps: that count, of each round."""
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        model = save_even_model(Path(folder), shape.tower, shape.decoder, shape.decoder_layers, shape.tower_layers)
        data = deal(model, Degrees(), Degrees(), make_samples(MICRO_BATCHES, shape.side, shape.words), MICRO_BATCHES)
        with join_alone():
            units = measure_units(model, shape, "", as_batch(data))
        problem = PartitionProblem(units, pipeline_programs(SCHEDULE, 2, 1, MICRO_BATCHES))
        found = {method: cuts for method, cuts in cuts_of(problem).items() if method in ("parameters", "exact")}
        plans = {method: plan_chain(model, stages_of(units, cuts), MICRO_BATCHES) for method, cuts in found.items()}
        replayed: dict[str, list[float]] = {method: [] for method in plans}
        taken: dict[str, list[float]] = {method: [] for method in plans}
        for _ in range(rounds):
            for method, plan in plans.items():
                with join_alone():
                    replayed[method] += _replays(plan, as_batch(data), steps)
                taken[method] += run_plan(plan, data, steps)
    for method, plan in plans.items():
        wall, replay = median(taken[method]), median(replayed[method])
        yield {
            "question": "wall", "stages": 2, "micro_batches": MICRO_BATCHES, "method": method,
            "devices": [[s.name for s in plan.graph.stages if d in s.devices] for d in (0, 1)],
            "wall_s": round(wall, 4), "replay_s": round(replay, 4), "wall_to_replay": round(wall / replay, 4),
            "steps": len(taken[method]), "rounds": rounds,
        }  # fmt: skip


def _replays(plan: RunPlan, batch: Batch, steps: int) -> list[float]:
    """Of each step that counts, with the updates of the device that takes longest over them."""
    chain = Chain(plan, MICRO_BATCHES)
    found = []
    for _ in range(steps + 1):
        seconds, _ = chain.step(batch)
        updates = [
            sum(chain.others.get(stage.name, 0.0) for stage in plan.graph.stages if device in stage.devices)
            for device in range(plan.graph.device_count())
        ]
        found.append(chain.replay_alike(seconds) + max(updates))
    return found[1:]


def run_plan(plan: RunPlan, data: StepData, steps: int) -> list[float]:
    """Wall seconds of each step that counts. As in a run, the next step is submitted while one runs."""
    graph, schedule = plan.graph, make_schedule(SCHEDULE, plan.graph, MICRO_BATCHES)
    settings = {s.name: stage_settings(plan.config, graph, s, "cpu", STEPS, rules=plan.rules) for s in graph.stages}
    with started(graph, PINNED, settings) as stages:
        return list(timed(graph, stages, schedule, as_batch(data, ray.put), steps)[0])
