"""What is known about each step: one JSON object a line in metrics.jsonl, and the same numbers for TensorBoard."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary as TensorBoardSummary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dhp.observe.numbers import from_json, json_safe


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step over the whole run, summed or averaged over all actors. None: not known (yet)."""

    step: int
    """Optimizer step, from 1."""
    epoch: float | None = None
    """Passes over the data so far, in epochs."""
    loss: float | None = None
    """Sum of token losses / target tokens of the global batch, nats a token."""
    grad_norm: float | None = None
    """Norm of all gradients of both parts, before clipping."""
    lr: Mapping[str, float] | None = None
    """Learning rate of each part in this step."""
    tokens: int | None = None
    """Text tokens of the global batch, image placeholders included."""
    target_tokens: int | None = None
    """Tokens that have a loss."""
    vision_tokens: int | None = None
    """Patches of the images, as the vision tower sees them."""
    samples: int | None = None
    """Samples of the global batch."""
    images: int | None = None
    """Images of the global batch."""
    clips: int | None = None
    """Clips of sound of the global batch."""
    step_s: float | None = None
    """Wall time of the step, seconds."""
    data_s: float | None = None
    """Part of step_s spent waiting for data, seconds."""
    tokens_per_s: float | None = None
    """tokens / step_s."""
    flops: Mapping[str, int] | None = None
    """Useful floating-point operations of the step, forward and backward, by part. What counts: docs/performance.md."""
    mfu: float | None = None
    """Model FLOPs utilisation: the sum of flops / (step_s × the peak of all devices), each device counted once."""
    memory_bytes: Mapping[str, int] | None = None
    """Most device memory that an actor's allocator had reserved in the step, of the actor that had most, by part: what
    tensors took and what no other process could have. None on CPUs."""
    activation_bytes: Mapping[str, int] | None = None
    """Peak of what forward keeps for backward on the actor that kept most, by part, where activations are measured."""
    comm_bytes: Mapping[str, Mapping[str, int]] | None = None
    """Bytes sent in the step by all ranks of a part, by part and kind: `all_reduce`, `all_gather`, `reduce_scatter`,
    `all_to_all`, `broadcast`, `reduce` (collectives inside the part), `ring` (messages between its ranks) and `handoff`
    (results for other parts). Kinds of which nothing was sent are left out. How each is counted: docs/operations.md."""
    dist_ratio: Mapping[str, float] | None = None
    """Idle share through imbalance, Σ (busiest rank - rank) / (ranks × busiest rank), for vision and text."""
    pad_ratio: float | None = None
    """Padding tokens / all tokens the model was given."""
    skipped_samples: int | None = None
    """Bad samples left out since the run began."""


class MetricsWriter:
    """Appends each step to `<run_dir>/metrics.jsonl` and to TensorBoard event files in `<run_dir>/tb`.

    A line is on disk when `write` returns. Numbers that JSON has no word for are written as the strings
    "NaN", "Infinity" and "-Infinity" (protobuf's JSON mapping): null keeps its meaning of "not known", and
    `float()` reads them back.
    """

    def __init__(self, run_dir: str | Path):
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._lines = open(run_dir / "metrics.jsonl", "a", encoding="utf-8")
        self._events = EventFileWriter(str(run_dir / "tb"))

    def write(self, metrics: StepMetrics) -> None:
        """Record one step."""
        values = asdict(metrics)
        self._lines.write(json.dumps(json_safe(values), allow_nan=False) + "\n")
        self._lines.flush()
        self._events.add_event(_event(metrics.step, values))

    def close(self) -> None:
        """Write what TensorBoard's queue still holds, and close both files. May be called again."""
        try:
            self._lines.close()
        finally:
            self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def keep_steps(run_dir: str | Path, last: int) -> list[StepMetrics]:
    """Cut off metrics.jsonl whatever a stopped run wrote after step `last`, half a line included; what is left."""
    path = Path(run_dir) / "metrics.jsonl"
    if not path.exists():
        return []
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _is_step_until(line, last)]
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(unfinished, path)
    return read_metrics(run_dir)


def read_metrics(run_dir: str | Path) -> list[StepMetrics]:
    """The steps of a run, oldest first, as written. Raises FileNotFoundError without a metrics.jsonl."""
    with open(Path(run_dir) / "metrics.jsonl", encoding="utf-8") as lines:
        return [StepMetrics(**{key: from_json(value) for key, value in json.loads(line).items()}) for line in lines]


def _is_step_until(line: str, last: int) -> bool:
    try:
        return json.loads(line)["step"] <= last
    except ValueError:  # the run was killed while it wrote this
        return False


def _event(step: int, values: dict[str, Any]) -> Event:
    scalars = [(tag, value) for tag, value in _scalars("", values) if tag != "step"]
    summary = TensorBoardSummary(
        value=[TensorBoardSummary.Value(tag=tag, simple_value=value) for tag, value in scalars]
    )
    return Event(wall_time=time.time(), step=step, summary=summary)


def _scalars(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number by its path: `loss`, `lr/vision`, `comm_bytes/text/all_reduce`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _scalars(f"{prefix}{name}/", value)
        elif value is not None:
            yield f"{prefix}{name}", float(value)
