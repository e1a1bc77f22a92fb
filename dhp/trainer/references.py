"""Computes what preferences are compared with, before the first step."""

from collections.abc import Iterator

from dhp.cluster.hangs.watch import wait_all
from dhp.config.parts import parts, split_share
from dhp.core.errors import CheckpointError
from dhp.core.reports import SampleSums
from dhp.objectives.objectives import OBJECTIVES
from dhp.step.step import evaluate_batch
from dhp.trainer.evaluation import Evaluation, of_evaluation
from dhp.trainer.preference_means import add_by_side
from dhp.trainer.session import Session

BASE = "base"


def find_references(session: Session, evaluation: Evaluation | None = None) -> None:
    """Compute the log-probabilities of the datasets that lack them, once the stages are there.

    Raises CheckpointError where the model that they are of is gone."""
    config, limit = session.config, session.config.cluster.step_timeout_s
    if not OBJECTIVES[config.training.objective].refers:
        return
    actors = dict.fromkeys(config.data.datasets, session.data) | (evaluation.readers() if evaluation else {})
    lacking = {
        name: actor for name, actor in actors.items() if split_share(name)[0] in actor.ask("lacks", timeout_s=limit)
    }
    off = _leaves_adapters_out(session) if lacking else False
    for name, actor in lacking.items():
        session.say(f"log-probabilities of {split_share(name)[0]} by the reference, before the first step")
        values = dict(_by_row(session, name, off))
        actor.ask("keep_references", split_share(name)[0], values, timeout_s=limit)


def _leaves_adapters_out(session: Session) -> bool:
    """Whether the reference is what the actors hold without adapters; else it is all of it."""
    config, plan = session.config, session.plan
    base, begun = (
        config.training.preference.reference == BASE,
        any(part.lora.begin_from for part in parts(config).values()),
    )
    if session.start.checkpoint is None:
        return base and bool(plan.adapters)
    changed = any(one.used and plan.rules.trains(one.name) and "lora_" not in one.name for one in plan.parameters)
    if changed or (begun and not base):
        raise CheckpointError(
            f"the log-probabilities of the reference are not in data.cache_dir={config.data.cache_dir}, and the run "
            "goes on with weights that have changed since. Bring the cache back, or begin anew (training.resume=never)"
        )
    return True


def _by_row(session: Session, name: str, off: bool) -> Iterator[tuple[int, tuple[float, ...]]]:
    limit, sharing = session.config.cluster.step_timeout_s, session.graph.stages[-1].degrees.sequence
    actor = session.open_reader(of_evaluation(session.config, name), refers=False)
    batches = actor.ask("steps", 1, timeout_s=limit)
    actor.end_at(batches)
    session.leave_adapters_out(off)
    try:
        for batch in range(batches):
            wait_all(actor.request(batch), limit)
            refs = evaluate_batch(session.stages, session.graph, actor.take(batch))
            wait_all(session.take_watched(), limit)
            info, shares = session.info(refs.info), session.values(refs.shares)
            sums: list[SampleSums | None] = [one.samples for one in shares]
            for (_, row), of_sides in add_by_side(info, sums, sharing).items():
                yield row, tuple(-side.total for side in of_sides)
    finally:
        session.leave_adapters_out(False)
        actor.stop()
