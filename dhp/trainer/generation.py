"""Answers prompts with the stages of a configuration."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dhp.batch.prompts import make_held_out_feed, make_prompt_feed
from dhp.checkpoint.folder import read_about
from dhp.checkpoint.resume import Start
from dhp.checkpoint.shard_files import read_extents
from dhp.cluster.data_actor import DatasetActor
from dhp.cluster.hangs.watch import wait_all
from dhp.config.generate_request import GenerateRequest
from dhp.config.parts import parts
from dhp.config.schema import Config
from dhp.core.batch import Answer, Sampling
from dhp.core.errors import CheckpointError
from dhp.core.process import ending
from dhp.data.media.sources import File, MediaResolver, Video
from dhp.data.read.records import Part, Record, Turn
from dhp.observe.metrics import AnswerMetrics
from dhp.plan.batches import feed_settings
from dhp.plan.run_plan import RunPlan, plan_run
from dhp.step.step import answer_batch
from dhp.trainer.evaluation import HeldOut, of_evaluation
from dhp.trainer.preflight import prepare
from dhp.trainer.preload import preloaded
from dhp.trainer.session import Session

ROUNDS = 3  # of a benchmark, after one that does not count
PROMPT = "the prompt"
_ROOT = Path("/")


@dataclass(frozen=True)
class Figures:
    """Time and memory of an answer. first_token_s: seconds from when its pictures are decoded to its first token.
    tokens_per_s: of the tokens after that one; None where there are none. peak_bytes, cache_bytes: by rank of the
    decoder, see `dhp.core.batch.Answer`."""

    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    tokens_per_s: float | None
    peak_bytes: tuple[int, ...]
    cache_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Generated:
    """An answer: its tokens, the one that ended it included, and what they say without special ones."""

    token_ids: tuple[int, ...]
    text: str
    figures: Figures


def generate(
    config: Config, checkpoint: Path | None, request: GenerateRequest, say: Callable[[str], None], rounds: int = 0
) -> Generated:
    """Start what `config` says (`dhp.config.generate_request.answering`), with the weights of `checkpoint` or of the
    model itself, and answer the request. rounds: answer it again so often, and report what these took.

    The prompt is read before anything is started, and so is what of the checkpoint does not fit. Nothing is written but
    logs, in run_dir. Raises DhpError; leaves no process."""
    with preloaded(config):
        return _generate(config, checkpoint, request, say, rounds)


def _generate(
    config: Config, checkpoint: Path | None, request: GenerateRequest, say: Callable[[str], None], rounds: int
) -> Generated:
    plan = _checked(config, checkpoint, say, reads=False)
    config = plan.config
    sampling = _sampling(config, request)
    records = [read_record(request, config.data.allow_http)]
    say("reading the prompt")
    feed = make_prompt_feed(feed_settings(config), records, sampling)
    feed.read(feed.batch(0))
    with _session(plan, checkpoint, say) as session:
        prompts = session.open_prompts(make_prompt_feed, config, records, sampling)
        _load(session, say)
        say("answering")
        answered = [_answer(session, prompts) for _ in range(1 + rounds)]
    token_ids = answered[0][1][0].token_ids
    return Generated(token_ids, feed.said(token_ids), _figures(answered[1:] or answered))


def generate_all(
    config: Config, checkpoint: Path | None, request: GenerateRequest, say: Callable[[str], None]
) -> Generator[AnswerMetrics, None, None]:
    """As `generate`, for every sample of the request's dataset, with one start for all of them.

    The first prompt is read before anything is started; media of the others are read when they are answered. Raises
    DhpError; leaves no process once it is exhausted or closed."""
    with preloaded(config):
        yield from _generate_all(config, checkpoint, request, say)


def _generate_all(
    config: Config, checkpoint: Path | None, request: GenerateRequest, say: Callable[[str], None]
) -> Iterator[AnswerMetrics]:
    plan = _checked(config, checkpoint, say, reads=True)
    config = plan.config
    sampling, name = _sampling(config, request), request.dataset
    say(f"reading the first prompt of {name}")
    make_held_out_feed(feed_settings(of_evaluation(config, name)), 1, sampling)
    step = 0 if checkpoint is None else read_about(checkpoint)["step"]
    with _session(plan, checkpoint, say) as session:
        asked = HeldOut(session, name, None, sampling)
        _load(session, say)
        say(f"answering {len(asked):,} prompts of {name}")
        yield from asked.answers(step)


def _checked(config: Config, checkpoint: Path | None, say: Callable[[str], None], reads: bool) -> RunPlan:
    """The plan of a model that can answer and fits the checkpoint. Raises DhpError."""
    plan = plan_run(prepare(config, new_run=False, say=say, reads=reads), trains=False)
    plan.family.check_answers()
    if checkpoint is not None:
        check_weights(plan, checkpoint)
    return plan


def _sampling(config: Config, request: GenerateRequest) -> Sampling:
    return Sampling(
        request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=config.seed,
    )


@contextmanager
def _session(plan: RunPlan, checkpoint: Path | None, say: Callable[[str], None]) -> Iterator[Session]:
    start = Start() if checkpoint is None else Start(checkpoint.absolute(), read_about(checkpoint)["step"])
    with Session(plan, Path(plan.config.run_dir), start, say) as session, ending():
        yield session


def _load(session: Session, say: Callable[[str], None]) -> None:
    say(session.describe_loading())
    session.start_stages(1, states=False)


def read_record(request: GenerateRequest, allow_http: bool = False) -> Record:
    """The request as one turn of a user, its images first, then its videos. Raises DataError."""
    images: list[Part] = [_file(image, "image", allow_http) for image in request.images]
    videos: list[Part] = [Video(_file(video, "video", allow_http)) for video in request.videos]
    text = [request.prompt] if request.prompt else []
    return Record(PROMPT, 1, PROMPT, (Turn("user", (*images, *videos, *text)),))


def check_weights(plan: RunPlan, checkpoint: Path) -> None:
    """Raises CheckpointError where a checkpoint's weights are not those of the run's model and adapters."""
    source, adapters = plan.source, plan.adapters
    for part in parts(plan.config):
        held = {
            name: tuple(extent["shape"])
            for file in sorted((checkpoint / part).glob("rank_*.json"))
            for name, extent in read_extents(file).items()
        }
        wanted = {one.name: one.shape for one in plan.parameters if one.part == part}
        for name, shape in wanted.items():
            if held.get(name, shape) != shape:
                raise CheckpointError(
                    f"{checkpoint}: {name} has the shape {list(held[name])}, and that of {source} {list(shape)}: the "
                    "checkpoint is of another model. Name the configuration of its run"
                )
        missing = [] if part in adapters else [name for name in wanted if name not in held]
        strange = [name for name in held if part in adapters and name not in wanted]
        if missing or strange:
            wrong = f"has no {missing[0]}, which" if missing else f"has {strange[0]}, and no parameter of that name"
            raise CheckpointError(
                f"{checkpoint / part} {wrong} {source} has{' with these adapters' if adapters else ''}: the checkpoint "
                f"is of another model, or its run had other adapters. Name the configuration of its run"
            )


def _file(name: str, what: str, allow_http: bool) -> File:
    """A file that the user names; unlike what annotations name, it may be anywhere."""
    path = name if "://" in name or name.startswith("data:") else str(Path(name).expanduser().absolute())
    return MediaResolver(_ROOT, allow_http).find(path, what)


def _answer(session: Session, prompts: DatasetActor) -> tuple[float, Sequence[Answer]]:
    """Seconds, and the answer of each rank of the decoder."""
    timeout_s = session.config.cluster.step_timeout_s
    wait_all(prompts.request(0), timeout_s)
    begun = time.perf_counter()
    refs = answer_batch(session.stages, session.graph, prompts.take(0))
    wait_all(session.take_watched(), timeout_s)
    answers: list[Answer] = session.values(refs.replicas[0])
    return time.perf_counter() - begun, answers


def _figures(answers: Sequence[tuple[float, Sequence[Answer]]]) -> Figures:
    """The median of several answers to the same prompt."""
    last = answers[-1][1]
    new = len(last[0].token_ids)
    behind = [of[0].seconds - of[0].prefill_s for _, of in answers]
    return Figures(
        prompt_tokens=last[0].prompt_tokens,
        new_tokens=new,
        first_token_s=median(whole - rest for (whole, _), rest in zip(answers, behind, strict=True)),
        tokens_per_s=(new - 1) / median(behind) if new > 1 else None,
        peak_bytes=tuple(one.peak_bytes for one in last),
        cache_bytes=tuple(one.cache_bytes for one in last),
    )
