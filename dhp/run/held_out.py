"""Answers prompts of a dataset with the ranks of a session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dhp.base.generation import Answer, Sampling
from dhp.batching.prompts import Prompt, make_held_out_feed
from dhp.cluster.watch import wait_all
from dhp.config.mixing import split_share
from dhp.config.schema import Config
from dhp.config.unbalanced import unbalanced
from dhp.observe.metrics import AnswerMetrics
from dhp.run.session import Session
from dhp.step.generate import answer_batch


class HeldOut:
    """Samples of a dataset, cut before their first answers."""

    def __init__(self, session: Session, asked: str, count: int | None, sampling: Sampling):
        """asked: the dataset as data.eval_datasets has it. count: of its first samples; None: all. Raises what reading
        raises."""
        self._session, self._name = session, split_share(asked)[0]
        self._timeout_s = session.config.cluster.step_timeout_s
        self._actor = session.open_prompts(make_held_out_feed, of_evaluation(session.config, asked), count, sampling)
        self._steps: int = self._actor.ask("steps", timeout_s=self._timeout_s)
        self._prompts: list[Prompt] = self._actor.ask("prompts", timeout_s=self._timeout_s)

    def __len__(self) -> int:
        """Prompts."""
        return len(self._prompts)

    def answers(self, step: int) -> Iterator[AnswerMetrics]:
        """Each prompt's, after `step` optimizer steps."""
        answers = (answer for number in range(self._steps) for answer in self._answer(number))
        for number, (prompt, answer) in enumerate(zip(self._prompts, answers, strict=False), start=1):
            yield AnswerMetrics(
                step=step,
                dataset=self._name,
                number=number,
                prompt=prompt.question,
                reference=prompt.reference or "",
                answer=self._actor.ask("said", answer.token_ids, timeout_s=self._timeout_s),
                tokens=len(answer.token_ids),
            )

    def _answer(self, number: int) -> list[Answer]:
        """One for each replica of the decoder; the last of them may have had nothing to answer."""
        wait_all(self._actor.request(number), self._timeout_s)
        session = self._session
        refs = answer_batch(session.stages, session.graph, session.batch(self._actor.take(number)))
        wait_all(session.take_watched(), self._timeout_s)
        return session.values([of_replica[0] for of_replica in refs.replicas])


def of_evaluation(config: Config, name: str) -> Config:
    """The configuration of what reads one dataset for evaluation: each sample once, in the file's order."""
    registered = split_share(name)[0]
    registry = config.data.data_registry | {registered: replace(config.data.data_registry[registered], weight=1.0)}
    data = replace(unbalanced(config.data), datasets=[name], data_registry=registry, shuffle=False)
    return replace(config, data=data)
