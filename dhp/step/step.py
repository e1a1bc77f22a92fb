"""A step's calls in order: training, evaluation, generation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dhp.core.batch import Batch
from dhp.core.graph import StageGraph, Tie
from dhp.step.schedule import Forward, Schedule, last_backwards, without_idle
from dhp.step.stages import InFlight, Ref, Stages


@dataclass(frozen=True)
class StepRefs:
    """Results of a submitted step: its counts, and by stage a report from each rank."""

    info: Ref
    reports: dict[str, list[Any]]


def train_step(stages: Stages, schedule: Schedule, ties: tuple[Tie, ...], batch: Batch) -> StepRefs:
    """Submit one step. Nothing is waited for: refs go from actor to actor, the run loop opens none of them."""
    accumulate_gradients(stages, schedule, batch, updates=True)
    return update_weights(stages, ties, batch)


def accumulate_gradients(
    stages: Stages, schedule: Schedule, batch: Batch, updates: bool = False, more: bool = False
) -> None:
    """Submit the schedule's actions in order, without those that have no work in this step. updates: `update_weights`
    follows, with which the last of them may go. more: gradients of other batches may join these before it."""
    in_flight = InFlight(batch)
    actions = without_idle(schedule, lambda action: stages[action.node.stage].is_idle(action, batch))
    last = last_backwards(actions)
    for at, action in enumerate(actions):
        stages[action.node.stage].run(action, at in last and not more, in_flight)
    for stage in stages.values() if not updates else ():
        stage.flush()


def update_weights(stages: Stages, ties: tuple[Tie, ...], batch: Batch) -> StepRefs:
    """Submit the norm of each stage, and to each an optimizer step clipped by the norm of all.

    A stage gets the norms of the others and keeps its own: the stage that ends a step goes on at once. Of a weight that
    two stages hold, each gets the other's gradient first."""
    ties = tuple(tie for tie in ties if tie.trained)
    shares = {name: stages[name].tied_gradient(batch.info) for tie in ties for name in (tie.owner, tie.other)}
    tied = {tie.owner: shares[tie.other] for tie in ties} | {tie.other: shares[tie.owner] for tie in ties}
    norms = {name: stage.grad_norm_sq(batch.info, tied.get(name, ())) for name, stage in stages.items()}
    reports = {}
    for name, stage in stages.items():
        others = [norm for other, norm in norms.items() if other != name]
        reports[name] = stage.optimizer_step(batch.info, *others)
    return StepRefs(batch.info, reports)


@dataclass(frozen=True)
class EvaluationRefs:
    """Results of a submitted batch: its counts, and the share of the loss of each shard of the last stage."""

    info: Ref
    shares: list[Any]


def evaluate_batch(stages: Stages, graph: StageGraph, batch: Batch) -> EvaluationRefs:
    """Submit the batch's micro-batches, one behind another through all stages. Nothing is waited for.

    Each stage ends the batch when all others have used what it sent: it may write there again then."""
    in_flight = InFlight(batch)
    for micro_batch in range(len(batch.work[graph.parts()[-1]])):
        for node in graph.nodes():
            number, later = divmod(micro_batch, graph.batch_of(graph.stage(node.stage).part))
            action = Forward(node, number)
            if not later and not stages[node.stage].is_idle(action, batch):
                stages[node.stage].evaluate(action, in_flight)
    return report_losses(stages, batch)


def report_losses(stages: Stages, batch: Batch) -> EvaluationRefs:
    """Submit that all stages report what they have computed of a batch and have not reported, and end it."""
    shares = {name: stage.evaluated(batch.info) for name, stage in stages.items()}
    _end_batch(stages, batch, shares)
    *_, last = stages.values()
    return EvaluationRefs(batch.info, last.leaders(shares[last.spec.name]))


def _end_batch(stages: Stages, batch: Batch, shares: Mapping[str, Sequence[Ref]]) -> None:
    for name, stage in stages.items():
        stage.end_evaluation(batch.info, *(ref for other, refs in shares.items() if other != name for ref in refs))


@dataclass(frozen=True)
class AnswerRefs:
    """Results of submitted prompts: their counts, and the answer of each rank of the last stage, replica by
    replica."""

    info: Ref
    replicas: tuple[tuple[Ref, ...], ...]


def answer_batch(stages: Stages, graph: StageGraph, batch: Batch) -> AnswerRefs:
    """Submit one micro-batch of prompts. Nothing is waited for.

    Each stage ends it when all others have used what it sent: it may write there again then."""
    in_flight = InFlight(batch)
    *before, last = graph.nodes()
    for node in before:
        if not stages[node.stage].is_idle(Forward(node, 0), batch):
            stages[node.stage].evaluate(Forward(node, 0), in_flight)
    answers = stages[last.stage].generate(Forward(last, 0), in_flight)
    shares = {node.stage: stages[node.stage].evaluated(batch.info) for node in before} | {last.stage: answers}
    _end_batch(stages, batch, shares)
    of_replica = stages[last.stage].spec.degrees.world // stages[last.stage].spec.degrees.data
    cuts = range(0, len(answers), of_replica)
    return AnswerRefs(batch.info, tuple(tuple(answers[first : first + of_replica]) for first in cuts))
