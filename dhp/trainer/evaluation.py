"""Evaluates held-out loss and answers every so many steps."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from dhp.batch.prompts import Prompt, make_held_out_feed
from dhp.checkpoint.folder import read_about
from dhp.checkpoint.resume import Start
from dhp.cluster.data_actor import DatasetActor
from dhp.cluster.hangs.watch import Watched, wait_all
from dhp.config.generate_request import unbalanced
from dhp.config.parts import split_share
from dhp.config.schema import Config
from dhp.core.batch import Answer, Sampling, StepInfo
from dhp.core.errors import ConfigError
from dhp.core.process import ending, say_nothing
from dhp.core.reports import EvaluatedShare
from dhp.observe.metrics import AnswerMetrics, EvalMetrics, Line, StepMetrics, read_evaluations
from dhp.plan.run_plan import plan_run
from dhp.step.step import EvaluationRefs, answer_batch, evaluate_batch
from dhp.trainer.preference_means import preference_means
from dhp.trainer.preflight import prepare
from dhp.trainer.preload import preloaded
from dhp.trainer.session import Session
from dhp.trainer.step_reports import add_by_sample


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
                row=prompt.row,
            )

    def _answer(self, number: int) -> list[Answer]:
        """One for each replica of the decoder; the last of them may have had nothing to answer."""
        wait_all(self._actor.request(number), self._timeout_s)
        session = self._session
        refs = answer_batch(session.stages, session.graph, self._actor.take(number))
        wait_all(session.take_watched(), self._timeout_s)
        return session.values([of_replica[0] for of_replica in refs.replicas])


def of_evaluation(config: Config, name: str) -> Config:
    """The configuration of what reads one dataset for evaluation: each sample once, in the file's order."""
    registered = split_share(name)[0]
    registry = config.data.data_registry | {registered: replace(config.data.data_registry[registered], weight=1.0)}
    data = replace(unbalanced(config.data), datasets=[name], data_registry=registry, shuffle=False)
    return replace(config, data=data)


_NEVER = 1 << 40  # optimizer steps of a run that takes none: no warm-up is longer
MANY = 50  # batches of an evaluation: a minute or more
TOGETHER = ""  # the dataset's name in the line about all of them


@dataclass(frozen=True)
class EvalData:
    """A dataset that is read batch by batch, each sample once. held_out: its prompts that are answered; None: none."""

    name: str
    actor: DatasetActor
    batches: int
    held_out: HeldOut | None


@dataclass(frozen=True)
class JudgedSample:
    """A sample of a dataset, by its row in the annotations, from 0. right: how many of its target tokens are the
    likeliest, each after what truly stands before it."""

    dataset: str
    row: int
    right: int
    targets: int

    @property
    def exact(self) -> bool:
        """Whether all are: greedy decoding gives them then, one after another."""
        return self.right == self.targets


def judge_samples(info: StepInfo, shares: Sequence[EvaluatedShare], sharing: int) -> tuple[JudgedSample, ...]:
    """The batch's samples that have a target. sharing: shards that share a row."""
    sums = add_by_sample(info, [one.samples for one in shares], sharing)
    return tuple(JudgedSample(*place, round(one.total), one.targets) for place, one in sums.items() if one.targets)


@dataclass(frozen=True)
class _Done:
    info: StepInfo
    shares: tuple[EvaluatedShare, ...]  # of the last stage's shards, those that share a row together
    samples: tuple[JudgedSample, ...] = ()

    @property
    def loss(self) -> float:
        return sum(one.loss for one in self.shares)

    @property
    def right(self) -> int:
        return sum(one.right for one in self.shares)

    @property
    def counted(self) -> int:
        return sum(one.targets for one in self.shares)


class Evaluation:
    """All datasets of data.eval_datasets, as often as is asked for."""

    def __init__(self, session: Session, exchange: str = "", say: Callable[[str], None] = say_nothing):
        """exchange: as `BatchReaderSettings` has it. say: receives a line at each tenth of many batches. Raises
        ConfigError for a dataset without samples, and what reading raises."""
        self._session, self._graph, self._exchange, self._say = session, session.graph, exchange, say
        self._timeout_s = session.config.cluster.step_timeout_s
        self._datasets = [self._open(name) for name in session.config.data.eval_datasets]

    def run(self, step: int, judged: Callable[[JudgedSample], None] | None = None) -> list[EvalMetrics]:
        """A line for each dataset and, of several, one for all together: the loss after `step` optimizer steps.

        judged: is called with every sample, dataset by dataset, in the order of their files."""
        measured = [self._evaluate(data) for data in self._datasets]
        if judged is not None:
            for of_dataset, _ in measured:
                samples = chain.from_iterable(one.samples for one in of_dataset)
                for sample in sorted(samples, key=lambda one: one.row):
                    judged(sample)
        lines = [self._line(step, data.name, *own) for data, own in zip(self._datasets, measured, strict=True)]
        if len(lines) == 1:
            return lines
        done, seconds = zip(*measured, strict=True)
        return [*lines, self._line(step, TOGETHER, list(chain.from_iterable(done)), sum(seconds))]

    def answers(self, step: int) -> list[AnswerMetrics]:
        """The model's answers after `step` optimizer steps, where they are asked for."""
        return [one for data in self._datasets if data.held_out is not None for one in data.held_out.answers(step)]

    def readers(self) -> dict[str, DatasetActor]:
        """The actors that read the datasets, by their names in data.eval_datasets."""
        return dict(zip(self._session.config.data.eval_datasets, (data.actor for data in self._datasets), strict=True))

    def prompts(self) -> Counter[str]:
        """By dataset, how many prompts are answered in each evaluation."""
        return Counter({data.name: len(data.held_out) for data in self._datasets if data.held_out is not None})

    def _open(self, name: str) -> EvalData:
        actor = self._session.open_reader(of_evaluation(self._session.config, name), self._exchange)
        batches = actor.ask("steps", 1, timeout_s=self._timeout_s)
        if not batches:
            raise ConfigError(
                f"data.eval_datasets: {name} has no sample. Name another dataset, or a larger share of it (`name%50`)"
            )
        actor.end_at(batches)
        training, held_out = self._session.config.training, None
        if training.eval_answers:
            held_out = HeldOut(self._session, name, training.eval_answers, Sampling(training.eval_answer_tokens))
        return EvalData(split_share(name)[0], actor, batches, held_out)

    def _line(self, step: int, name: str, done: Sequence[_Done], seconds: float) -> EvalMetrics:
        line = _metrics(step, name, done, seconds)
        if not any(one.info.marks for one in done):
            return line
        sharing, of_shards = (
            self._graph.stages[-1].degrees.sequence,
            [[own.samples for own in one.shares] for one in done],
        )
        means = preference_means([one.info for one in done], of_shards, sharing, self._session.config.training)
        return replace(line, preferences=means)

    def _evaluate(self, data: EvalData) -> tuple[list[_Done], float]:
        """The dataset's batches, and the seconds that they took."""
        begun = time.perf_counter()
        return self._batches(data), time.perf_counter() - begun

    def _batches(self, data: EvalData) -> list[_Done]:
        flying: deque[tuple[EvaluationRefs, list[Watched]]] = deque()
        done, reported = [], tenths(data.batches)
        for batch in range(data.batches):
            if batch in reported:
                self._say(f"{data.name}: {batch} of {data.batches} batches")
            wait_all(data.actor.request(batch), self._timeout_s)
            refs = evaluate_batch(self._session.stages, self._graph, data.actor.take(batch))
            flying.append((refs, self._session.take_watched()))
            if len(flying) > 1:  # one is submitted while another one runs
                done.append(self._finish(*flying.popleft()))
        return done + [self._finish(*one) for one in flying]

    def _finish(self, refs: EvaluationRefs, watched: Sequence[Watched]) -> _Done:
        wait_all(watched, self._timeout_s)
        info, shares = self._session.info(refs.info), tuple(self._session.values(refs.shares))
        judged = () if info.marks else judge_samples(info, shares, self._graph.stages[-1].degrees.sequence)
        return _Done(info, shares, judged)


def tenths(batches: int) -> set[int]:
    """After which of many batches a line says how far it is."""
    return {batches * tenth // 10 for tenth in range(1, 10)} if batches >= MANY else set()


def due(config: Config, step: int, last: int, saves: bool = False) -> bool:
    """Whether the loss is measured after `step` of `last` steps. saves: whether there is a checkpoint then."""
    training = config.training
    if not config.data.eval_datasets:
        return False
    every = training.eval_steps
    best = training.best_metric is not None and saves
    return step == last or best or (every is not None and step % every == 0)


def misses(config: Config, step: int, record: Sequence[Line], prompts: Counter[str]) -> bool:
    """Whether the record has `step` and lacks lines of the evaluation after it: of losses, which are written in order,
    the last one, or any of the answers to `prompts`, counted by dataset."""
    if not any(isinstance(line, StepMetrics) and line.step == step for line in record):
        return False
    names = [split_share(name)[0] for name in config.data.eval_datasets]
    last = names[0] if len(names) == 1 else TOGETHER
    answered = Counter(line.dataset for line in record if isinstance(line, AnswerMetrics) and line.step == step)
    return last not in {line.dataset for line in read_evaluations(record, step)} or not prompts <= answered


def _metrics(step: int, name: str, done: Sequence[_Done], seconds: float) -> EvalMetrics:
    """Of one dataset, or of all as if they were one."""
    targets, counted = sum(one.info.target_tokens for one in done), sum(one.counted for one in done)
    weight = sum(one.info.total_weight for one in done)
    judged = [sample.exact for one in done for sample in one.samples]
    return EvalMetrics(
        step=step,
        dataset=name,
        loss=sum(one.loss * one.info.total_weight for one in done) / weight if weight else None,
        accuracy=sum(one.right for one in done) / counted if counted else None,
        exact=sum(judged) / len(judged) if judged else None,
        target_tokens=targets,
        tokens=sum(one.info.tokens for one in done),
        samples=sum(one.info.samples for one in done),
        skipped_samples=sum(len(one.info.skipped) for one in done),
        seconds=seconds,
    )


Judge = Callable[[str, JudgedSample], None]  # whose images a sample had: "", OWN or OTHERS


def evaluate(
    config: Config,
    checkpoint: Path | None,
    say: Callable[[str], None],
    exchanges: Sequence[str] = ("",),
    judge: Judge | None = None,
) -> dict[str, list[EvalMetrics]]:
    """Start what `config` says, with the weights of `checkpoint` or of the model itself, and measure the loss once for
    each of `exchanges` (as `BatchReaderSettings` has them).

    Nothing is written but logs, in run_dir. Raises DhpError; leaves no process."""
    with _loaded(config, checkpoint, say) as (session, step):
        return {
            images: Evaluation(session, images, say).run(step, judge and partial(judge, images)) for images in exchanges
        }


@contextmanager
def _loaded(config: Config, checkpoint: Path | None, say: Callable[[str], None]) -> Iterator[tuple[Session, int]]:
    with preloaded(config), _started(prepare(config, new_run=False, say=say), checkpoint, say) as started:
        yield started


@contextmanager
def _started(config: Config, checkpoint: Path | None, say: Callable[[str], None]) -> Iterator[tuple[Session, int]]:
    start = Start() if checkpoint is None else Start(checkpoint.absolute(), read_about(checkpoint)["step"])
    with Session(plan_run(config), Path(config.run_dir), start, say) as session, ending():
        say(session.describe_loading())
        session.start_stages(_NEVER, states=False)
        say(f"evaluating {', '.join(config.data.eval_datasets)}")
        yield session, start.step
