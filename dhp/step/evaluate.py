"""One batch of evaluation: every stage forward and the loss; no activations are saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dhp.base.stages import StageGraph
from dhp.step.schedule import Forward
from dhp.step.stages import Batch, InFlight, Ref, Stages


@dataclass(frozen=True)
class EvaluationRefs:
    """Results of a submitted batch: its counts, and the share of the loss of each shard of the last stage."""

    info: Ref
    shares: list[Any]


def evaluate_batch(stages: Stages, graph: StageGraph, batch: Batch) -> EvaluationRefs:
    """Submit the batch's micro-batches, one behind another through all stages. Nothing is waited for.

    Each stage ends the batch when all others have used what it sent: it may write there again then.
    """
    in_flight = InFlight(batch)
    for micro_batch in range(len(next(iter(batch.work.values())))):
        for node in graph.nodes():
            action = Forward(node, micro_batch)
            if not stages[node.stage].is_idle(action, batch):
                stages[node.stage].evaluate(action, in_flight)
    shares = {name: stage.evaluated(batch.info) for name, stage in stages.items()}
    for name, stage in stages.items():
        stage.end_evaluation(batch.info, *(ref for other, refs in shares.items() if other != name for ref in refs))
    last = stages[graph.stages[-1].name]
    return EvaluationRefs(batch.info, last.leaders(shares[last.spec.name]))
