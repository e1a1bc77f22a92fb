"""Lines where output is a file, a bar where it is a terminal."""

import io

from dhp.observe.metrics import StepMetrics
from dhp.observe.progress import Progress, step_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step=step, loss=3.21014, grad_norm=1.0203, lr={"vision": 3e-3, "text": 3e-3}, step_s=0.414, tokens_per_s=1532.4
    )


def shown_steps(total: int, interval: int, first: int = 1) -> list[int]:
    stream = io.StringIO()
    with Progress(total, interval, stream) as progress:
        for step in range(first, total + 1):
            progress.update(metrics(step))
    return [int(line.split()[1].split("/")[0]) for line in stream.getvalue().splitlines()]


def test_a_line():
    expected = "step 10/60  loss 3.2101  grad_norm 1.02  lr 3.0e-03  0.41 s/step  1532 tokens/s"
    assert step_line(metrics(10), 60) == expected


def test_a_line_without_figures_and_with_a_rate_for_each_part():
    line = step_line(StepMetrics(step=1, lr={"vision": 1e-4, "text": 1e-3}), 2)
    assert line == "step 1/2  loss -  grad_norm -  lr vision 1.0e-04 text 1.0e-03  - s/step  - tokens/s"


def test_the_first_the_last_and_every_interval_are_shown():
    assert shown_steps(12, 5) == [1, 5, 10, 12]
    assert shown_steps(3, 1) == [1, 2, 3]
    assert shown_steps(12, 5, first=7) == [7, 10, 12]


def test_a_terminal_gets_a_bar_with_the_figures():
    stream = Terminal()
    with Progress(2, 1, stream) as progress:
        progress.update(metrics(1))
        progress.note("a note")
        progress.update(metrics(2))
    shown = stream.getvalue()
    assert "2/2" in shown and "a note\n" in shown
    assert "loss 3.2101, 0.41 s/step, 1532 tokens/s" in shown
