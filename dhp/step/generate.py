"""Answers prompts, one for each replica of the last stage: encoders' forward, then prefill and decoding."""

from __future__ import annotations

from dataclasses import dataclass

from dhp.base.stages import StageGraph
from dhp.step.schedule import Forward
from dhp.step.stages import Batch, InFlight, Ref, Stages


@dataclass(frozen=True)
class AnswerRefs:
    """Results of submitted prompts: their counts, and the answer of each rank of the last stage, replica by
    replica."""

    info: Ref
    replicas: tuple[tuple[Ref, ...], ...]


def answer_batch(stages: Stages, graph: StageGraph, batch: Batch) -> AnswerRefs:
    """Submit one micro-batch of prompts. Nothing is waited for.

    Each stage ends it when all others have used what it sent: it may write there again then.
    """
    in_flight = InFlight(batch)
    *before, last = graph.nodes()
    for node in before:
        if not stages[node.stage].is_idle(Forward(node, 0), batch):
            stages[node.stage].evaluate(Forward(node, 0), in_flight)
    answers = stages[last.stage].generate(Forward(last, 0), in_flight)
    shares = {node.stage: stages[node.stage].evaluated(batch.info) for node in before} | {last.stage: answers}
    for name, stage in stages.items():
        stage.end_evaluation(batch.info, *(ref for other, refs in shares.items() if other != name for ref in refs))
    of_replica = stages[last.stage].spec.degrees.world // stages[last.stage].spec.degrees.data
    cuts = range(0, len(answers), of_replica)
    return AnswerRefs(batch.info, tuple(tuple(answers[first : first + of_replica]) for first in cuts))
