"""A step played in seconds: the run's schedule, with a time for each action and each hand-over."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dhp.config.parts import DECODER, parts
from dhp.config.resolve import micro_batches
from dhp.core.graph import Edge, StageSpec
from dhp.step.schedule import Action, Forward, make_schedule
from dhp.step.timed import Timeline, play
from dhp.trainer.forecast.question import Question
from dhp.trainer.forecast.seconds import StageSeconds
from dhp.trainer.memory import VALUE_BYTES
from dhp.trainer.plan import RunPlan
from dhp.trainer.tower_units import tower_width
from dhp.trainer.units import hidden_width

MOST_MICRO_BATCHES = 64  # of a step that is played


def count_played(asked: Question) -> int:
    """As many micro-batches as are played, in whole groups of the decoder's stages."""
    stages, count = len(asked.plan.graph.of_part(DECODER)), micro_batches(asked.plan.config)
    return min(count, MOST_MICRO_BATCHES - MOST_MICRO_BATCHES % stages or stages)


def slowest_micro_batch(asked: Question, seconds: Mapping[str, StageSeconds]) -> float:
    """Of a further micro-batch: what the device with most work takes for it."""
    plan = asked.plan
    return max(
        sum(seconds[s.name].micro_batch_s for s in stages_on(plan, device))
        for device in range(plan.graph.device_count())
    )


def count_actions(asked: Question) -> int:
    """Of the schedule, on the device that has most of them."""
    plan = asked.plan
    own = [sum(len(s.nodes) * 2 for s in stages_on(plan, device)) for device in range(plan.graph.device_count())]
    return max(own) * micro_batches(plan.config)


def play_step(asked: Question, seconds: Mapping[str, StageSeconds]) -> Timeline:
    """A step of as many micro-batches as are played."""
    plan, graph = asked.plan, asked.plan.graph
    schedule = make_schedule(plan.config.training.schedule, graph, count_played(asked))
    programs = {stage.name: [a for a in schedule if a.node.stage == stage.name] for stage in graph.stages}

    def of(action: Action) -> float:
        own = seconds[action.node.stage]
        return (own.forward_s if isinstance(action, Forward) else own.backward_s)[action.node.chunk]

    return play(programs, graph, of, _hop(asked))


def _hop(asked: Question) -> Callable[[Edge, bool], float]:
    """Seconds of a hand-over between two stages: what one rank sends."""
    plan, loads, hand = asked.plan, asked.loads, asked.machine.handover
    sections = parts(plan.config)

    def hop(edge: Edge, back: bool) -> float:
        source, target = (plan.graph.stage(node.stage) for node in (edge.source, edge.target))
        value = VALUE_BYTES[sections[source.part].dtype]
        if source.part == DECODER:
            rows = loads.text.tokens / source.degrees.sequence * hidden_width(plan.family)
        elif target.part == DECODER:
            rows = loads.pictures.features / source.degrees.shards * hidden_width(plan.family) * len(edge.tensors)
        else:
            rows = loads.pictures.patches / source.degrees.shards * tower_width(plan.family)
        return hand.latency_s + rows * value / hand.bytes_s

    return hop


def stages_on(plan: RunPlan, device: int) -> list[StageSpec]:
    """Stages with a rank on a device."""
    return [stage for stage in plan.graph.stages if device in stage.devices]
