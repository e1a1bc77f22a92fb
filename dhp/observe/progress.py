"""What a person sees while a run trains: a bar on a terminal, plain lines anywhere else."""

import sys
from types import TracebackType
from typing import TextIO

from tqdm import tqdm

from dhp.observe.metrics import StepMetrics
from dhp.observe.numbers import shown


class Progress:
    """Shows steps as they end. `total_steps` counts from the run's first step; `done` of them came before a resume."""

    def __init__(self, total_steps: int, log_interval: int = 1, stream: TextIO | None = None, done: int = 0):
        self._total_steps = total_steps
        self._log_interval = log_interval
        self._stream = sys.stderr if stream is None else stream
        self._shown_any = False
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm(total=total_steps, initial=done, unit="step", file=self._stream, dynamic_ncols=True)

    def update(self, metrics: StepMetrics) -> None:
        """Show one finished step: always on a bar; as a line for the first, the last and every log_interval-th."""
        if self._bar is not None:
            self._bar.set_postfix_str(_bar_figures(metrics), refresh=False)
            self._bar.update()
            return
        regular = metrics.step % self._log_interval == 0
        if regular or not self._shown_any or metrics.step == self._total_steps:
            self.note(step_line(metrics, self._total_steps))
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

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def step_line(metrics: StepMetrics, total_steps: int) -> str:
    """`step 10/60  loss 3.2101  grad_norm 1.02  lr 3.0e-03  0.41 s/step  1532 tokens/s`."""
    figures = (
        f"step {metrics.step}/{total_steps}",
        f"loss {shown(metrics.loss, '.4f')}",
        f"grad_norm {shown(metrics.grad_norm, '.3g')}",
        f"lr {_learning_rates(metrics)}",
        f"{shown(metrics.step_s, '.2f')} s/step",
        f"{shown(metrics.tokens_per_s, '.0f')} tokens/s",
    )
    return "  ".join(figures)


def _bar_figures(metrics: StepMetrics) -> str:
    return (
        f"loss {shown(metrics.loss, '.4f')}, {shown(metrics.step_s, '.2f')} s/step, "
        f"{shown(metrics.tokens_per_s, '.0f')} tokens/s"
    )


def _learning_rates(metrics: StepMetrics) -> str:
    """One number where all parts share it, else each part's."""
    rates = dict(metrics.lr or {})
    if len(set(rates.values())) <= 1:
        return shown(next(iter(rates.values()), None), ".1e")
    return " ".join(f"{part} {rate:.1e}" for part, rate in rates.items())
