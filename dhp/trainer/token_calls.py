"""Calls of someone's own loop that take token ids and patches as they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from math import inf
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from dhp.cluster.hangs.watch import wait_all
from dhp.config.parts import DECODER, decoder, parts, resolved
from dhp.config.ranges import INTERLEAVED
from dhp.config.resolve import check_answers
from dhp.config.rules import DEEPSPEED
from dhp.core.batch import Answer, Batch, Sampling, StepData, StepInfo
from dhp.core.errors import ClusterError, ConfigError, PartFailed, RunEnded
from dhp.core.reports import EvaluatedShare
from dhp.core.text import one_line
from dhp.step.schedule import make_schedule
from dhp.step.stages import EngineProtocol
from dhp.step.step import AnswerRefs, accumulate_gradients, answer_batch, evaluate_batch, report_losses
from dhp.trainer.session import Session

if TYPE_CHECKING:
    from dhp.batch.token_samples import TokenBatcher, TokenSample
    from dhp.data.sample.sample import Sample
    from dhp.objectives.log_probabilities import TokenCost

    Samples = Sequence[TokenSample | Sample]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class TokenLosses:
    """loss: of all samples together, divided by N. log_probabilities: of each sample's targets, float64 [targets]."""

    loss: float
    log_probabilities: list[np.ndarray]


def call(method: Callable[P, T]) -> Callable[P, T]:
    """A method of a run that goes on: of one that is over, or whose ranks may stand anywhere since a call failed, it
    raises RunEnded and submits nothing."""

    @wraps(method)
    def checked(*given: P.args, **named: P.kwargs) -> T:
        run: Any = given[0]
        if run._ended:
            raise RunEnded(run._ended)
        try:
            return method(*given, **named)
        except BaseException as error:
            if isinstance(error, PartFailed | ClusterError) or not isinstance(error, Exception):
                reason = one_line(str(error).partition("\n")[0])[:200]
                run._ended = (
                    f"the run cannot go on: {method.__name__} failed ({type(error).__name__}: {reason}), and its ranks "
                    "may have gradients of a part of it. Leave its `with` block, and begin one that resumes"
                )
            raise

    return checked


class TokenCalls:
    """What `Run` computes of samples that it is handed. Raises DataError and ConfigError before anything is submitted,
    and what `wait_all` raises."""

    _session: Session
    step: int  # optimizer steps done
    _ended = ""  # why no call can follow

    def __init__(self) -> None:
        self._unstepped: list[tuple[StepInfo, float]] = []  # of gradients that wait for the step: counts, and the loss
        self._batches = 0  # read so far

    @call
    def forward(
        self, samples: Samples, temperature: float = 1.0, entropies: bool = False, adapters: bool = True
    ) -> list[np.ndarray]:
        """Log-probabilities of each sample's target tokens, float64 [targets], without dropout. temperature: by which
        logits are divided. entropies: [targets, 2], each beside the entropy of what it is of, in nats. adapters: false:
        by the model without them, a reference."""
        from dhp.objectives.log_probabilities import cross_entropy, linear

        session = self._session
        if not adapters and not any(part.lora.rank for part in parts(session.config).values()):
            raise ConfigError("adapters=False is a forward without adapters, and no part has any: set text.lora.rank")
        data = self._read(samples, linear if entropies else cross_entropy, 1.0, {}, temperature, columns=())
        with nullcontext() if adapters else _without_adapters(session):
            shares = evaluate_batch(session.stages, session.graph, session.put(data)).shares
            return [one.reshape(len(one), 2) if entropies else one for one in self._losses(data, shares)[1]]

    @call
    def forward_backward(
        self,
        samples: Samples,
        loss: str | TokenCost,
        normalizer: float | None = None,
        temperature: float = 1.0,
        **settings: Any,
    ) -> TokenLosses:
        """Add the gradients of a loss / normalizer to those that wait for `optim_step`.

        loss: cross_entropy, importance_sampling, ppo, dpo, linear, `module.function` or a function of a module
        (docs/own-loop.md). normalizer: None: the sum of the targets' weights, for dpo the number of pairs.
        temperature: by which logits are divided. settings: of the loss."""
        sections = parts(self._session.config).values()
        adds = not any(part.zero_stage and part.zero_engine == DEEPSPEED for part in sections)
        if self._unstepped and not adds:
            raise ConfigError(
                "forward_backward was called twice before optim_step, and zero_engine=deepspeed sums gradients over "
                "ranks once a step. Give all samples in one call, or set zero_engine=fsdp"
            )
        data = self._read(samples, loss, normalizer, settings, temperature)
        session, count = self._session, len(data.work[DECODER])
        batch, schedule = session.put(data), make_schedule(session.config.training.schedule, session.graph, count)
        accumulate_gradients(session.stages, schedule, batch, more=adds)
        found = TokenLosses(*self._losses(data, report_losses(session.stages, batch).shares))
        self._unstepped.append((data.info, found.loss))
        return found

    @call
    def drop_gradients(self) -> None:
        """Forget those that wait for `optim_step`."""
        self._unstepped.clear()
        for stage in self._session.stages.values():
            stage.group.execute_all_async(EngineProtocol.drop_gradients)
        self._waited(())

    @call
    def generate(self, prompts: Samples, sampling: Sampling) -> list[Answer]:
        """Answers of the ranks that train. sampling: its seed and a prompt's place decide what is drawn; without `stop`
        answers end as the model's do."""
        session = self._session
        check_answers(
            session.config, "Run.generate", "train with another layout, or answer by `python -m dhp generate`"
        )
        session.plan.family.check_answers()
        read = self._batcher.read(prompts)
        flying, answers = deque[AnswerRefs](), list[Answer]()
        for data in list(self._batcher.prompts(read, sampling)):  # what is wrong with any shows before the first
            flying.append(answer_batch(session.stages, session.graph, session.put(data)))
            if len(flying) > 1:  # one is submitted while another one runs
                answers += self._answers(flying.popleft())
        for refs in flying:
            answers += self._answers(refs)
        return answers[: len(read)]

    @call
    def positions(self, samples: Samples) -> list[np.ndarray]:
        """Those that the model is given of each sample's tokens, [L], or [3, L] where it counts in time, height and
        width: made of token ids and grids."""
        return list(map(self._batcher.positions, self._batcher.read(samples)))

    @call
    def weights(self) -> Iterator[tuple[str, Any]]:
        """All weights by the keys of an export, in its number formats, a layer at a time."""
        from dhp.trainer.weight_stream import stream_weights

        return stream_weights(self._session)

    @cached_property
    def _batcher(self) -> TokenBatcher:
        from dhp.batch.token_samples import TokenBatcher

        session = self._session
        interleaved = session.config.training.schedule == INTERLEAVED
        multiple = resolved(decoder(session.config).pipeline) if interleaved else 1
        return TokenBatcher(session.feed_settings(session.config), multiple)

    def _read(
        self,
        samples: Samples,
        loss: str | TokenCost,
        normalizer: float | None,
        settings: dict[str, Any],
        temperature: float = 1.0,
        columns: tuple[str, ...] | None = None,
    ) -> StepData:
        from dhp.batch.token_samples import with_marks
        from dhp.objectives.objectives import find_loss

        if not 0 < temperature < inf:
            raise ConfigError(f"temperature={temperature} divides logits: it is a number above 0")
        if columns is None:  # `read` tells what else the samples may be
            first = samples[0] if isinstance(samples, Sequence) and len(samples) else None
            columns = tuple(getattr(first, "columns", ()))
        objective, names = find_loss(loss, settings, columns)
        objective.temperature = temperature
        read = self._batcher.read(samples, names)
        read = with_marks(read) if objective.compares else read
        self._batches += 1
        return self._batcher.make(read, objective, normalizer, self._batches)

    def _losses(self, data: StepData, refs: Sequence[Any]) -> tuple[float, list[np.ndarray]]:
        """The loss, and log-probabilities by sample, beside what else was reported. refs: of the shards where the head
        is."""
        shares: list[EvaluatedShare] = self._waited(refs)
        sharing = self._session.graph.stages[-1].degrees.sequence
        runs: dict[int, list[tuple[int, np.ndarray]]] = {}
        for shard, share in enumerate(shares):
            for micro_batch, of_rows in (share.samples.tokens if share.samples else {}).items():
                places = data.info.order[micro_batch][shard // sharing]
                for sample, first, values in of_rows:
                    turned = -values if values.ndim == 1 else values * (-1, 1)  # losses, and entropies behind them
                    runs.setdefault(places[sample][1], []).append((first, turned))
        every = range(max((place for row in data.info.order for of in row for _, place in of), default=-1) + 1)
        ordered = [[run for _, run in sorted(runs.get(at, ()), key=lambda one: one[0])] for at in every]
        found = [np.concatenate(of) if of else np.zeros(0) for of in ordered]
        return sum(share.loss for share in shares), found

    def _answers(self, refs: AnswerRefs) -> list[Answer]:
        """One for each replica; the last of them may have had nothing to answer."""
        return self._waited([of_replica[0] for of_replica in refs.replicas])

    def _waited(self, refs: Sequence[Any]) -> list[Any]:
        wait_all(self._session.take_watched(), self._session.config.cluster.step_timeout_s)
        return self._session.values(refs)

    def _take_unstepped(self) -> tuple[Batch, float]:
        """What `optim_step` is about: the counts of all batches since the last one, and their loss. Raises ConfigError
        where there are none."""
        if not self._unstepped:
            raise ConfigError("optim_step has no gradients: call forward_backward first")
        infos, losses = zip(*self._unstepped, strict=True)
        self._unstepped.clear()
        counts = {name: sum(getattr(one, name) for one in infos) for name in _SUMMED}
        return Batch(replace(infos[-1], step=self.step, **counts), {}, {}), sum(losses)


@contextmanager
def _without_adapters(session: Session) -> Iterator[None]:
    session.leave_adapters_out(True)
    try:
        yield
    finally:
        session.leave_adapters_out(False)


_SUMMED = ("samples", "images", "clips", "tokens", "target_tokens", "total_weight", "vision_tokens", "padded_tokens")
