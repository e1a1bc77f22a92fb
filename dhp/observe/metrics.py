"""Metrics of a step: in metrics.jsonl and for TensorBoard."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary as TensorBoardSummary
from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dhp.core.errors import RecordError
from dhp.core.files import write_whole
from dhp.core.text import from_json, json_safe


def numbers_event(step: int, numbers: Mapping[str, float]) -> Event:
    """Numbers of a step by their tags."""
    values = [TensorBoardSummary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
    return Event(wall_time=time.time(), step=step, summary=TensorBoardSummary(value=values))


def texts_event(step: int, tag: str, texts: Mapping[str, str]) -> Event:
    """Texts under their names, for TensorBoard's page of texts, which reads Markdown."""
    text = "\n\n".join(f"{name}:\n\n{_quoted(said)}" for name, said in texts.items())
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
    value = TensorBoardSummary.Value(tag=tag, metadata=metadata, tensor=tensor)
    return Event(wall_time=time.time(), step=step, summary=TensorBoardSummary(value=[value]))


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


# Kinds of lines: about an optimizer step, about an evaluation, about an answer that was generated then.
TRAIN, EVAL, ANSWER = "train", "eval", "answer"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step over the whole run, summed or averaged over all actors. None: not known (yet).

    Each field's string says its unit and when it is null; docs/reference/metrics.md is made from them."""

    kind: str = TRAIN
    """What the line tells of: `train`, an optimizer step. Unit: a word."""
    step: int
    """Optimizer step, from 1. Unit: steps."""
    epoch: float | None = None
    """Passes over the data so far, this step included. Unit: epochs."""
    loss: float | None = None
    """Sum of token losses / target tokens of the global batch, before the step. Unit: nats a token. Null: no token of
    the batch has a loss."""
    grad_norm: float | None = None
    """Norm of all gradients of all stages together, before clipping. Unit: nats a token for a unit of weight."""
    stage_norms: Mapping[str, float] | None = None
    """Norm of each stage's gradients, before clipping, by stage; their squares sum up to that of grad_norm. A
    weight that two stages hold counts in one. Unit: nats a token for a unit of weight. Null: stages without gradients
    are left out."""
    lr: Mapping[str, float] | None = None
    """Learning rate in this step, by group of parameters: a part's name, or a group of training.groups. Unit: a
    factor."""
    tokens: int | None = None
    """Text tokens of the global batch, image placeholders included, padding not. Unit: tokens."""
    target_tokens: int | None = None
    """Tokens that have a loss. Unit: tokens."""
    vision_tokens: int | None = None
    """Patches of the images, as the vision tower sees them, or saw them that are cached. Unit: patches."""
    samples: int | None = None
    """Samples of the global batch. Unit: samples."""
    images: int | None = None
    """Images and videos of the global batch. Unit: images."""
    cached_images: int | None = None
    """Of images, those that no tower encoded, because their features were in `data.cache_features`. Unit: images."""
    clips: int | None = None
    """Clips of sound of the global batch. Unit: clips."""
    step_s: float | None = None
    """Wall time of the step, from the end of the one before; writing a checkpoint is no part of it. Unit: seconds."""
    data_s: float | None = None
    """Part of step_s spent waiting for data. Unit: seconds."""
    busy_s: Mapping[str, float] | None = None
    """Of the step, the time in which a rank computes (forward, backward, norm, optimizer), mean of a stage's ranks, by
    stage. The rest of step_s it is idle or hands tensors over. See [Busy and idle](#busy-and-idle). Unit: seconds."""
    comm_s: Mapping[str, float] | None = None
    """Of busy_s, the time in collectives, waiting for other ranks among it, mean of a stage's ranks, by stage. Unit:
    seconds. Null: on GPUs, which the host does not wait for."""
    rank_pace: Mapping[str, Mapping[str, float | str]] | None = None
    """By stage, the seconds in which a rank computes (of busy_s, without those in collectives) / what they were
    predicted to be: the `min`, `median` and `max` of its ranks, and the `rank` with the most. Predicted is the planned
    time, else the mean of the stage's ranks, times the rank's share of the work (tokens, pairs, targets; patches).
    Stages without work in the step are left out. Unit: a factor, and a rank's name. Null: on GPUs, as comm_s."""
    tokens_per_s: float | None = None
    """tokens / step_s. Unit: tokens a second."""
    flops: Mapping[str, int] | None = None
    """Useful floating-point operations of the step, forward and backward, by part; vision's of encoded images alone,
    not of cached_images. What counts: [performance.md](../performance.md#mfu). Unit: operations."""
    mfu: float | None = None
    """Model FLOPs utilisation: the sum of flops / (step_s × the peak of all devices), each device counted once. Unit: a
    share of 1. Null: the peak of a device is not known, which the run says at its start, or was measured too low, so
    that the share would be above 1."""
    memory_bytes: Mapping[str, int] | None = None
    """Most device memory that an actor's allocator had reserved in the step, of the actor that had most, by stage. See
    [Memory](#memory). Unit: bytes. Null: on CPUs."""
    activation_bytes: Mapping[str, int] | None = None
    """Peak of what forward keeps for backward on the actor that kept most, by stage. Unit: bytes. Null: activations are
    not measured (`memory.accounting`, or `recompute=auto`)."""
    graphs: Mapping[str, Mapping[str, int]] | None = None
    """By stage, graphs that torch.compile has `made` since the rank began, and how often it has `given_up` a function
    that then runs uncompiled, of the rank with most. Unit: graphs. Null: stages that compile nothing are left out."""
    comm_bytes: Mapping[str, Mapping[str, int]] | None = None
    """Bytes sent in the step by all ranks of a stage, by stage and kind; kinds of which nothing was sent are left out.
    See [Communication](#communication). Unit: bytes."""
    expert_load: Mapping[str, Mapping[str, float]] | None = None
    """Rows of experts since the step before that has some, every `training.log_interval` steps. `hottest`: by layer,
    those of the expert with most / of the mean one; `busiest`: of the experts of one actor of `text.expert`, likewise;
    each layer of a step takes as long as its busiest actor. Unit: a factor. Null: without experts, or compiled."""
    dist_ratio: Mapping[str, float] | None = None
    """Idle share through imbalance, Σ (busiest rank - rank) / (ranks × busiest rank), by part. Unit: a share of 1."""
    pad_ratio: float | None = None
    """Padding tokens / all tokens the model was given. Unit: a share of 1."""
    sp_ratio: float | None = None
    """Where text actors share rows, of all tokens those that are divided over several actors though their samples are
    no longer than an actor's even share of the row; null where none do. Unit: a share of 1."""
    skipped_samples: int | None = None
    """Bad samples left out since the run began. Unit: samples."""
    skipped_steps: int | None = None
    """Steps since the run began that updated nothing because loss or gradient was not finite. Unit: steps."""
    sample_digest: str | None = None
    """CRC-32 of which samples the step has, in any layout: see [Samples of a step](#samples-of-a-step). Unit: eight hex
    digits."""
    preferences: Mapping[str, float] | None = None
    """Means over the step's preferences: `chosen_logp` and `rejected_logp`, log-probabilities of both sides' answers
    (by token where there is no reference), `chosen_reward` and `rejected_reward`, beta times what they have moved from
    the reference, `margin`, the one less the other, and `accuracy`, the share of preferences where that is above 0. Of
    single answers, the second side is the answer to another prompt, and one that is not liked has the margin with its
    sign turned: up is better. Unit: nats, and a share of 1. Null: there are none.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalMetrics:
    """The loss on a dataset that nothing is trained on. Each field's string says its unit and when it is null."""

    kind: str = EVAL
    """What the line tells of: `eval`, an evaluation. Unit: a word."""
    step: int
    """Optimizer steps before it. Unit: steps."""
    dataset: str
    """Its name in data.data_registry; empty for the line about all of several together. Unit: text."""
    loss: float | None = None
    """Sum of token losses / target tokens of the whole dataset. Unit: nats a token. Null: no token of it has a loss."""
    accuracy: float | None = None
    """Of the tokens that have a loss, those to which the model gives the highest probability of all tokens, each after
    what truly stands before it. Unit: a share of 1. Null: no token has a loss."""
    exact: float | None = None
    """Of the samples that have such tokens, those all of whose are: greedy decoding gives their answers. Unit: a share
    of 1. Null: no sample has any, or the objective counts none by sample."""
    preferences: Mapping[str, float] | None = None
    """As of a step, over all of the dataset's; accuracy above is then the share that the objective counts as won. Unit:
    nats, and a share of 1. Null: there are none."""
    target_tokens: int = 0
    """Tokens that have a loss. Unit: tokens."""
    tokens: int = 0
    """Text tokens, image placeholders included, padding not. Unit: tokens."""
    samples: int = 0
    """Samples that were evaluated. Unit: samples."""
    skipped_samples: int = 0
    """Bad samples that were left out. Unit: samples."""
    seconds: float = 0.0
    """Wall time of the evaluation, which is no part of any step's. Unit: seconds."""

    def numbers(self, alone: bool) -> dict[str, float]:
        """Its numbers by the names that TensorBoard and loggers have: `eval/shapes/loss`, and `eval/loss` of all
        datasets. alone: there is no other dataset."""
        values = {"loss": self.loss, "accuracy": self.accuracy, "exact": self.exact, "seconds": self.seconds}
        values |= {name: value for name, value in (self.preferences or {}).items() if name != "accuracy"}
        own = flat(values, f"{EVAL}/{self.dataset}/") if self.dataset else {}
        return own | (flat(values, f"{EVAL}/") if alone or not self.dataset else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerMetrics:
    """An answer of the model, with its dataset's. Each field's string says its unit and when it is null."""

    kind: str = ANSWER
    """What the line tells of: `answer`, one that was generated with an evaluation. Unit: a word."""
    step: int
    """Optimizer steps before it. Unit: steps."""
    dataset: str
    """Name in data.data_registry of the dataset that asks. Unit: text."""
    number: int
    """Of the answer among those of its dataset, from 1. Unit: answers."""
    prompt: str
    """Text of the last turn before the answer. Unit: text."""
    reference: str
    """What the dataset answers. Unit: text."""
    answer: str
    """What the model does, greedily. Unit: text."""
    tokens: int
    """Of the model's answer, the one that ended it included. Unit: tokens."""
    row: int | None = None
    """Of the question in its dataset's annotations, from 0. Unit: rows."""


Line = StepMetrics | EvalMetrics | AnswerMetrics
_TEXTS = ("kind", "dataset", "sample_digest")  # fields of steps and evaluations that are no numbers


class MetricsWriter:
    """Appends each step to `<run_dir>/metrics.jsonl` and to TensorBoard event files in `<run_dir>/tb`.

    A line is on disk when `write` returns. Numbers that JSON has no word for are written as the strings
    "NaN", "Infinity" and "-Infinity" (protobuf's JSON mapping): null keeps its meaning of "not known", and
    `float()` reads them back."""

    def __init__(self, run_dir: str | Path):
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._lines = open(run_dir / "metrics.jsonl", "a", encoding="utf-8")
        self._events = EventFileWriter(str(run_dir / "tb"))

    def write(self, metrics: StepMetrics) -> dict[str, float]:
        """Record one step; its numbers by the names that TensorBoard has."""
        numbers = flat(asdict(metrics))
        self._append(metrics, numbers_event(metrics.step, numbers))
        return numbers

    def write_evaluation(self, metrics: EvalMetrics, alone: bool) -> dict[str, float]:
        """Record an evaluation on one dataset; its numbers by the names that TensorBoard has. alone: on no other."""
        numbers = metrics.numbers(alone)
        self._append(metrics, numbers_event(metrics.step, numbers))
        return numbers

    def write_answer(self, metrics: AnswerMetrics) -> None:
        """Record an answer, for TensorBoard as text."""
        texts = {"prompt": metrics.prompt, "reference": metrics.reference, "answer": metrics.answer}
        self._append(metrics, texts_event(metrics.step, f"{ANSWER}/{metrics.dataset}/{metrics.number}", texts))

    def close(self) -> None:
        """Write what TensorBoard's queue still holds, and close both files. May be called again."""
        try:
            self._lines.close()
        finally:
            self._events.close()

    def _append(self, line: Line, event: Event) -> None:
        self._lines.write(json.dumps(json_safe(asdict(line)), allow_nan=False) + "\n")
        self._lines.flush()
        self._events.add_event(event)


def keep_steps(run_dir: str | Path, last: int, evaluates: bool = False) -> list[Line]:
    """Cut off metrics.jsonl whatever a stopped run wrote after step `last`, half a line included; what is left.

    evaluates: step `last` is going to be evaluated once more, so what an evaluation then wrote goes too."""
    path = Path(run_dir) / "metrics.jsonl"
    if not path.exists():
        return []
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _is_step_until(line, last, evaluates)]
    write_whole(path, "".join(f"{line}\n" for line in kept))
    return read_record(run_dir)


def read_metrics(run_dir: str | Path) -> list[StepMetrics]:
    """The steps of a run, oldest first, as written; lines of another kind are left out. Raises FileNotFoundError
    without a metrics.jsonl."""
    return [line for line in read_record(run_dir) if isinstance(line, StepMetrics)]


def read_record(run_dir: str | Path) -> list[Line]:
    """All lines of a run, oldest first, as written, without those that are not whole. Raises FileNotFoundError without
    a metrics.jsonl, RecordError where a line has other fields than this version of dhp writes."""
    path = Path(run_dir) / "metrics.jsonl"
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if _is_whole(line):
            try:
                found.append(_line(json.loads(line)))
            except (KeyError, TypeError) as error:
                raise RecordError(
                    f"{path}, line {number}: another version of dhp, or another program, wrote it: {error}. Read it by "
                    "the version that wrote it"
                ) from error
    return found


def read_evaluations(lines: Sequence[Line], step: int | None = None) -> list[EvalMetrics]:
    """The lines of the evaluation after `step`, or of the last one; empty where there was none."""
    found = [line for line in lines if isinstance(line, EvalMetrics)]
    wanted = step if step is not None or not found else found[-1].step
    return [line for line in found if line.step == wanted]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Every number by its path: `loss`, `lr/vision`, `comm_bytes/text/all_reduce`. Not the step, which all belong to,
    nor what is no number."""
    return dict(_scalars(prefix, {key: value for key, value in values.items() if key != "step"}))


def _line(values: Mapping[str, Any]) -> Line:
    if values["kind"] == ANSWER:
        return AnswerMetrics(**values)  # all text as it is, "NaN" too
    known = {key: value if key in _TEXTS else from_json(value) for key, value in values.items()}
    return EvalMetrics(**known) if values["kind"] == EVAL else StepMetrics(**known)


def _is_whole(line: str) -> bool:
    """Not so where the run was killed while it wrote this."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _is_step_until(line: str, last: int, evaluates: bool) -> bool:
    if not _is_whole(line):
        return False
    values = json.loads(line)
    return values["step"] < last or values["step"] == last and (values["kind"] == TRAIN or not evaluates)


def _scalars(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _scalars(f"{prefix}{name}/", value)
        elif isinstance(value, (int, float)):
            yield f"{prefix}{name}", float(value)
