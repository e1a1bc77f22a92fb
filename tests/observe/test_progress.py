"""Lines where output is a file, a bar where it is a terminal."""

import fcntl
import io
import os
import pty
import struct
import termios
from contextlib import closing
from dataclasses import replace

import pytest

from dhp.observe.metrics import StepMetrics
from dhp.observe.terminal import ETA_STEPS, Progress, TimeLeft, clock, step_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def metrics(step: int, step_s: float = 0.414) -> StepMetrics:
    return StepMetrics(
        step=step,
        epoch=0.314,
        loss=3.21014,
        grad_norm=1.0203,
        lr={"vision": 3e-3, "text": 3e-3},
        step_s=step_s,
        data_s=0.1 * step_s,
        tokens_per_s=1532.4,
    )


def shown_steps(total: int, interval: int, first: int = 1) -> list[int]:
    stream = io.StringIO()
    with closing(Progress(total, interval, stream)) as progress:
        for step in range(first, total + 1):
            progress.update(metrics(step))
    return [int(line.split()[1].split("/")[0]) for line in stream.getvalue().splitlines()]


def test_a_line():
    expected = (
        "step 10/60  epoch 0.31  loss 3.2101  norm 1.02  lr 3.0e-03  0.41 s/step  1532 tokens/s  data 10%  eta 0:21"
    )
    assert step_line(metrics(10), 60, 20.7) == expected


def test_memory_and_utilisation_where_they_are_known():
    known = replace(metrics(10), memory_bytes={"vision": 2**30, "text": 44 * 2**30}, mfu=0.3812)
    assert "data 10%  44.0 GiB  mfu 38%  eta -" in step_line(known, 60)
    assert "mfu" not in step_line(replace(known, memory_bytes={}), 60)  # a CPU's changes with what else it does


def test_a_line_of_a_long_run_fits():
    long = replace(
        metrics(80_000), epoch=12.3, memory_bytes={"text": 78 * 2**30}, mfu=0.4, tokens_per_s=95_000.0, grad_norm=1.2e-5
    )
    assert len(step_line(long, 90_000, 9e4)) <= 140


def test_a_line_without_figures_and_with_a_rate_for_each_part():
    line = step_line(StepMetrics(step=1, lr={"vision": 1e-4, "text": 1e-3}), 2)
    assert line == (
        "step 1/2  epoch -  loss -  norm -  lr vision 1.0e-04 text 1.0e-03  - s/step  - tokens/s  data -  eta -"
    )


def test_the_first_step_says_little_of_the_time_left_and_outliers_nothing():
    left = TimeLeft(100)
    assert left.after(metrics(1, 30.0)) == 99 * 30.0
    assert left.after(metrics(2, 1.0)) == 98.0
    for step in range(3, 12):
        last = left.after(metrics(step, 60.0 if step == 7 else 1.0))
    assert last == 89.0  # of ten steps, the slowest and one of the fastest are left out


def test_only_the_last_steps_count():
    left = TimeLeft(1000)
    for step in range(1, 2 * ETA_STEPS):
        last = left.after(metrics(step, 5.0 if step < ETA_STEPS else 2.0))
    assert last == pytest.approx((1000 - step) * 2.0)


def test_no_time_is_told_before_any_is_known():
    assert TimeLeft(9).after(StepMetrics(step=1)) is None


def test_durations_in_words():
    told = [clock(seconds) for seconds in (None, 0.0, 7.4, 59.6, 3750.0, 3 * 86_400 + 4 * 3600.0)]
    assert told == ["-", "0:00", "0:07", "1:00", "1:02:30", "3d 04:00"]


def test_the_first_the_last_and_every_interval_are_shown():
    assert shown_steps(12, 5) == [1, 5, 10, 12]
    assert shown_steps(3, 1) == [1, 2, 3]
    assert shown_steps(12, 5, first=7) == [7, 10, 12]


def test_a_terminal_gets_a_bar_with_the_figures():
    stream = Terminal()
    with closing(Progress(2, 1, stream)) as progress:
        progress.update(metrics(1))
        progress.note("a note")
        progress.update(metrics(2))
    shown = stream.getvalue()
    assert "2/2" in shown and "a note\n" in shown
    assert "eta 0:00, loss 3.2101, 0.41 s/step, 1532 tokens/s, data 10%, epoch 0.31" in shown


def read_all(terminal: int) -> str:
    """What was written to a terminal whose other end is closed. The kernel hands it over piece by piece, in its own
    time: a single read may get the first piece alone."""
    pieces = []
    while True:
        try:
            pieces.append(os.read(terminal, 4096))
        except OSError:  # how Linux says that there is nothing left
            os.close(terminal)
            return b"".join(pieces).decode()


@pytest.mark.parametrize(("rows", "columns", "line"), [(0, 0, True), (24, 100, False)])
def test_a_terminal_without_rows_gets_lines(rows: int, columns: int, line: bool):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        with closing(Progress(2, 1, stream)) as progress:
            progress.update(metrics(1))
    shown = read_all(ours)
    assert ("step 1/2  epoch 0.31" in shown) == line and ("| 1/2 [" in shown) != line
