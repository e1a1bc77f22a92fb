"""Shows a run on the terminal: progress, steps, closing table."""

import json
import os
import shlex
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from dhp.core.axes import AXES
from dhp.core.reports import KernelUse
from dhp.core.text import harmless, shell_command, shown
from dhp.observe.metrics import AnswerMetrics, EvalMetrics, StepMetrics
from dhp.observe.summary import Summary


def kernel_lines(stage: str, uses: Sequence[KernelUse]) -> list[str]:
    """`kernels of text: attention varlen ×36, norm torch ×73, …`, and a line of what would be faster there, if any."""
    named = (f"{use.kind} {use.kernel}" + (f" ×{use.count}" if use.count else "") for use in uses)
    faster = [use.faster for use in uses if use.faster is not None]
    lines = [f"kernels of {stage}: {', '.join(named)}"]
    return lines + ([f"faster in {stage}: {'; '.join(faster)}"] if faster else [])


ETA_STEPS = 50  # whose mean gives the time of the others
TRIMMED = 0.1  # of them, the slowest and as many fastest, count for nothing
GIB = 2**30
LONGEST = 300  # characters of a text in a line
BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"  # tqdm's own rest knows no outliers


class Progress:
    """Shows steps as they end. `total_steps` counts from the run's first step; `done` of them came before a resume."""

    def __init__(self, total_steps: int, log_interval: int = 1, stream: TextIO | None = None, done: int = 0):
        self._total_steps = total_steps
        self._log_interval = log_interval
        self._stream = sys.stderr if stream is None else stream
        self._shown_any = False
        self._left = TimeLeft(total_steps)
        self._bar = None
        if _has_room(self._stream):
            self._bar = tqdm(total=total_steps, initial=done, file=self._stream, dynamic_ncols=True, bar_format=BAR)

    def update(self, metrics: StepMetrics) -> None:
        """Show one finished step: always on a bar; as a line for the first, the last and every log_interval-th."""
        left_s = self._left.after(metrics)
        if self._bar is not None:
            self._bar.set_postfix_str(_bar_figures(metrics, left_s), refresh=False)
            self._bar.update()
            return
        regular = metrics.step % self._log_interval == 0
        if regular or not self._shown_any or metrics.step == self._total_steps:
            self.note(step_line(metrics, self._total_steps, left_s))
            self._shown_any = True

    def note(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the bar as it stands. May be called again."""
        if self._bar is not None:
            self._bar.close()


def _has_room(stream: TextIO) -> bool:
    """Whether a bar can be drawn: some terminals, as a container's without a viewer, have no rows."""
    if not stream.isatty():
        return False
    try:
        return min(os.get_terminal_size(stream.fileno())) > 0
    except OSError:  # what is no file has no size to ask for
        return True


class TimeLeft:
    """Time that is left of a run: the steps that are left, each as long as the mean of the last ones."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._recent: deque[float] = deque(maxlen=ETA_STEPS)
        self._seen = 0

    def after(self, metrics: StepMetrics) -> float | None:
        """Seconds from the end of this step on; None where no step's time is known."""
        if metrics.step_s is not None:
            if self._seen == 1:
                self._recent.clear()  # the first step takes longer than all others
            self._seen += 1
            self._recent.append(metrics.step_s)
        if not self._recent:
            return None
        cut = int(len(self._recent) * TRIMMED)
        kept = sorted(self._recent)[cut : len(self._recent) - cut]
        return (self._total_steps - metrics.step) * sum(kept) / len(kept)


def eval_line(metrics: EvalMetrics) -> str:
    """`evaluated after step 20: shapes  loss 3.2101  accuracy 12.3%  exact 4.5%  12,345 target tokens  3.2 s`."""
    figures = (
        f"evaluated after step {metrics.step}: {metrics.dataset or 'all together'}",
        f"loss {shown(metrics.loss, '.4f')}",
        f"accuracy {shown(metrics.accuracy, '.1%')}",
        *_preferences(metrics.preferences)[:1],
        f"exact {shown(metrics.exact, '.1%')}",
        f"{metrics.target_tokens:,} target tokens",
        f"{metrics.seconds:.1f} s",
    )
    return "  ".join(figures)


def answer_line(metrics: AnswerMetrics) -> str:
    """`answer 1 of shapes after step 20: "Which shape?" → "A circle." (dataset: "A square.")`."""
    prompt, said, wanted = (_one_line(text) for text in (metrics.prompt, metrics.answer, metrics.reference))
    head = f"answer {metrics.number} of {metrics.dataset} after step {metrics.step}"
    return f"{head}: {prompt} → {said} (dataset: {wanted})"


def _one_line(text: str) -> str:
    return json.dumps(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…", ensure_ascii=False)


def step_line(metrics: StepMetrics, total_steps: int, left_s: float | None = None) -> str:
    """`step 10/60  epoch 0.31  loss 3.2101  norm 1.02  lr 3.0e-03  0.41 s/step  1532 tokens/s  data 2%  41.2 GiB
    mfu 38%  eta 0:21`, without what is not known: memory and mfu on CPUs, mfu of unknown devices.

    left_s: seconds that the run will still take."""
    figures = [
        f"step {metrics.step}/{total_steps}",
        f"epoch {shown(metrics.epoch, '.2f')}",
        f"loss {shown(metrics.loss, '.4f')}",
        *_preferences(metrics.preferences),
        f"norm {shown(metrics.grad_norm, '.3g')}",
        f"lr {_learning_rates(metrics)}",
        *_speed(metrics),
        f"eta {clock(left_s)}",
    ]
    return "  ".join(figures)


def _preferences(means: Mapping[str, float] | None) -> list[str]:
    return [] if means is None else [f"margin {means['margin']:.3g}", f"won {means['accuracy']:.0%}"]


def clock(seconds: float | None) -> str:
    """`0:07`, `1:02:30`, `3d 04:00`; `-` for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _bar_figures(metrics: StepMetrics, left_s: float | None) -> str:
    """The most important figures come first: a narrow terminal cuts off the end."""
    epoch = f"epoch {shown(metrics.epoch, '.2f')}"
    return ", ".join([f"eta {clock(left_s)}", f"loss {shown(metrics.loss, '.4f')}", *_speed(metrics), epoch])


def _speed(metrics: StepMetrics) -> list[str]:
    """A step's time, the share that went into waiting for data, and the most memory that one actor had reserved."""
    waited = None if metrics.data_s is None or not metrics.step_s else metrics.data_s / metrics.step_s
    figures = [
        f"{shown(metrics.step_s, '.2f')} s/step",
        f"{shown(metrics.tokens_per_s, '.0f')} tokens/s",
        f"data {shown(waited, '.0%')}",
    ]
    if metrics.memory_bytes:
        figures.append(f"{max(metrics.memory_bytes.values()) / GIB:.1f} GiB")
        if metrics.mfu is not None:  # a CPU's peak is measured, and changes with what else it does
            figures.append(f"mfu {metrics.mfu:.0%}")
    return figures


def _learning_rates(metrics: StepMetrics) -> str:
    rates = dict(metrics.lr or {})
    if len(set(rates.values())) <= 1:
        return shown(next(iter(rates.values()), None), ".1e")
    return " ".join(f"{part} {rate:.1e}" for part, rate in rates.items())


_DEGREES = tuple(axis.name for axis in AXES)


def closing_table(
    summary: Summary,
    run_dir: str | Path,
    checkpoint: str | Path | None = None,
    best: str | None = None,
    plugins: Sequence[str] = (),
    **more: str,
) -> str:
    """Aligned lines `name  value`, at most 20 with two of `more` (further rows, name to text).

    `checkpoint` is the newest checkpoint's directory; without one there is nothing to export or to generate with, and
    these rows are left out. best: which checkpoint is the best by training.best_metric, where one is. plugins:
    that these two have to name."""
    run_dir = Path(run_dir)
    rows: dict[str, str] = {"status": summary.status}
    if summary.error:
        rows["error"] = harmless(summary.error.strip().splitlines()[0])
    rows |= {
        "steps": str(summary.steps) + (f" (resumed from {summary.resumed_from})" if summary.resumed_from else ""),
        "loss": f"{shown(summary.first_loss, '.4f')} → {shown(summary.last_loss, '.4f')}",
        "median step": f"{shown(summary.median_step_s, '.3f')} s",
        "speed": f"{shown(summary.tokens_per_s, '.0f')} tokens/s",
    }
    if summary.eval_loss:
        accuracy, exact = summary.eval_accuracy or {}, summary.eval_exact or {}
        rows["held out"] = ", ".join(
            _held_out(name, loss, accuracy.get(name), exact.get(name)) for name, loss in summary.eval_loss.items()
        )
    if best:
        rows["best"] = best
    if summary.idle_share:
        idle = ", ".join(f"{stage} {share:.0%}" for stage, share in summary.idle_share.items())
        rows["idle"] = f"{idle} of the steps' time"
    rows |= {part: _part(world) for part, world in summary.world.items()}
    rows |= {name.replace("_", " "): text for name, text in more.items()}
    rows |= {"run directory": str(run_dir), "metrics": str(run_dir / "metrics.jsonl")}
    rows["curves"] = shlex.join(["tensorboard", "--logdir", str(run_dir)])
    if checkpoint is not None:
        rows["checkpoint"] = str(checkpoint)
        options = [f"--plugin={name}" for name in plugins]
        rows["export"] = shlex.join(shell_command("export", *options, str(checkpoint), "OUT_DIR"))
        settings = [f"plugins=[{','.join(plugins)}]"] if plugins else []
        rows["ask"] = shlex.join(shell_command("generate", f"checkpoint={checkpoint}", *settings, "prompt=TEXT"))
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())


def _held_out(name: str, loss: float | None, accuracy: float | None, exact: float | None) -> str:
    shares = {"accuracy": accuracy, "exact": exact}
    more = ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items() if share is not None)
    return f"{name} {shown(loss, '.4f')}" + (f" ({more})" if more else "")


def _part(world: Mapping[str, Any]) -> str:
    """`2 actors: ulysses 2` and whatever else is known of a part, degrees of 1 left out."""
    degrees = [f"{degree} {world[degree]}" for degree in _DEGREES if world.get(degree, 1) > 1]
    others = [f"{name} {value}" for name, value in world.items() if name not in (*_DEGREES, "num_actors")]
    actors = world.get("num_actors", 1)
    text = ", ".join(degrees + others)
    return f"{actors} actor{'s' if actors != 1 else ''}" + (f": {text}" if text else "")
