"""What a run records, reports and shows meanwhile."""

import errno
import fcntl
import io
import json
import math
import os
import pty
import struct
import termios
import time
import tracemalloc
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from dhp.core.errors import ConfigError, RecordError
from dhp.core.text import shell_command
from dhp.observe.metrics import StepMetrics
from dhp.observe.ranks import SAVE, START, STEPS, EventWriter, RankShare, read_events
from dhp.observe.recorder import Recorder
from dhp.observe.summary import StepTotals, Summary, versions, write_summary
from dhp.observe.terminal import ETA_STEPS, Progress, TimeLeft, clock, closing_table, step_line


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [(ValueError("bad"), "failed", "bad"), (KeyboardInterrupt(), "interrupted", None)],
    ids=["failed", "interrupted"],
)
def test_an_end_is_recorded_and_passes_through(
    tmp_path: Path, error: BaseException, status: str, told: str | None
) -> None:
    with pytest.raises(type(error)), Recorder(tmp_path, 1, {}, "seed: 0\n") as recorder:
        recorder.record(StepMetrics(step=1, loss=2.0))
        raise error
    assert (summary(tmp_path)["status"], summary(tmp_path)["error"], summary(tmp_path)["steps"]) == (status, told, 1)


@pytest.mark.parametrize(("error", "told"), [(KeyboardInterrupt(), True), (ValueError(), True), (None, False)])
def test_a_run_that_did_not_complete_tells_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException | None, told: bool
) -> None:
    with suppress(KeyboardInterrupt, ValueError):
        with Recorder(tmp_path, 1, {}, "seed: 0\n", resume=lambda newest: f"go on after {newest}") as recorder:
            recorder.checkpoint = Path("step_4")
            if error is not None:
                raise error
    assert ("resume         go on after step_4\n" in capsys.readouterr().out) == told


def test_a_run_refused_before_its_first_step_has_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError), Recorder(tmp_path, 1, {}, "seed: 0\n", resume=str):
        raise ConfigError("no GPU")
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError), Recorder(tmp_path, 1, {}, "seed: 0\n", resume=str):
        raise ValueError("crashed")
    out = capsys.readouterr().out
    assert "error          crashed" in out and "resume" not in out


def test_a_run_that_another_attempt_goes_on_with_has_no_table_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    goes_on = lambda error: isinstance(error, ValueError)
    for name in "abc":
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError), Recorder(tmp_path / "a", 1, {}, "seed: 0\n", goes_on=goes_on):
        raise ValueError("died")
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["error"] == "died"
    with pytest.raises(OSError), Recorder(tmp_path / "b", 1, {}, "seed: 0\n", goes_on=goes_on):
        raise OSError("refused")
    with Recorder(tmp_path / "c", 1, {}, "seed: 0\n", goes_on=goes_on):
        pass
    assert capsys.readouterr().out.count("status ") == 2


def test_the_record_stands_before_the_teardown_that_may_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError), Recorder(tmp_path, 1, {}, "seed: 0\n") as recorder:
        with recorder.before_teardown():
            recorder.record(StepMetrics(step=1, loss=2.0))
        assert summary(tmp_path)["status"] == "completed"
        raise OSError("the cluster is gone")
    assert summary(tmp_path)["status"] == "completed"
    assert capsys.readouterr().out.count("status") == 1


def begun(run_dir: Path) -> None:
    with Recorder(run_dir, 1, {}, "seed: 0\n") as recorder:
        for step in (1, 2, 3):
            recorder.record(StepMetrics(step=step, loss=2.0))


def test_a_run_that_cannot_be_continued_stays_as_it_was(tmp_path: Path) -> None:
    begun(tmp_path)
    before = {file.name: file.read_text() for file in tmp_path.iterdir() if file.is_file()}
    with pytest.raises(ValueError), Recorder(tmp_path, 1, {}, "seed: 7\n", tmp_path / "step_2", 2):
        raise ValueError("other data")
    assert {name: (tmp_path / name).read_text() for name in before} == before
    assert set(before) >= {"config.yaml", "metrics.jsonl", "summary.json"}


def test_a_run_that_is_continued_goes_on_in_its_record(tmp_path: Path) -> None:
    begun(tmp_path)
    with Recorder(tmp_path, 1, {}, "seed: 7\n", tmp_path / "step_2", 2) as recorder:
        recorder.begin(4)
        assert not (tmp_path / "summary.json").exists()
        recorder.record(StepMetrics(step=3, loss=1.0))
    steps = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [2.0, 2.0, 1.0] and (tmp_path / "config.yaml").read_text() == "seed: 7\n"
    assert summary(tmp_path)["steps"] == 3


def test_a_run_with_nothing_left_to_do_is_recorded_as_completed(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / "summary.json").unlink()
    with Recorder(tmp_path, 1, {}, "seed: 0\n", tmp_path / "step_3", 3):
        pass
    assert (summary(tmp_path)["status"], summary(tmp_path)["steps"]) == ("completed", 3)


class FullDisk:
    """Stands for whatever writes: each call of these methods fails."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        return full


def test_a_full_disk_is_told_with_its_directory_and_a_remedy(tmp_path: Path) -> None:
    told = rf"run_dir={tmp_path} cannot be written \(No space left on device\)\. Make room"
    with pytest.raises(RecordError, match=told), Recorder(tmp_path, 1, {}, "seed: 0\n") as recorder:
        recorder.record(StepMetrics(step=1, loss=2.0))
        recorder._metrics._lines.close()
        recorder._metrics._lines = FullDisk()
        recorder.record(StepMetrics(step=2, loss=2.0))
    assert summary(tmp_path)["status"] == "failed" and "No space left" in summary(tmp_path)["error"]


def test_closing_does_not_hide_why_the_run_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="the first"), Recorder(tmp_path, 1, {}, "seed: 0\n") as recorder:
        recorder._metrics.close()
        recorder._metrics._lines = recorder._metrics._events = recorder._trace = FullDisk()
        monkeypatch.setattr("dhp.observe.recorder.write_summary", FullDisk().write)
        raise ValueError("the first")
    out, err = capsys.readouterr()
    assert "error          the first" in out
    assert err.startswith(f"the run's record is not complete: run_dir={tmp_path} cannot be written")


@pytest.mark.parametrize("broken", ["_metrics", "_trace", "summary"])
def test_a_record_that_cannot_be_closed_fails_a_run_that_had_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    with pytest.raises(RecordError, match="No space left"), Recorder(tmp_path, 1, {}, "seed: 0\n") as recorder:
        if broken == "summary":
            monkeypatch.setattr("dhp.observe.recorder.write_summary", FullDisk().write)
        else:
            recorder._metrics.close()
            setattr(recorder, broken, FullDisk())
    if broken != "summary":
        assert summary(tmp_path)["status"] == "failed"


class Heard:
    """Stands for the loggers: notes what it is told, and has something to say at one step."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def begin(self) -> None:
        self.heard.append("begin")

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.heard.append((step, numbers))

    def take_messages(self) -> list[str]:
        return ["wandb is gone"] if len(self.heard) == 2 else []

    def end(self, status: str) -> None:
        self.heard.append(status)

    def wait(self, say: Callable[[str], None]) -> None:
        say("nothing is missing")


def test_loggers_get_every_step_and_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loggers = Heard()
    with Recorder(tmp_path, 1, {}, "seed: 0\n", loggers=loggers) as recorder:
        recorder.begin(2)
        for step in (1, 2):
            recorder.record(StepMetrics(step=step, loss=2.0 / step, lr={"text": 0.5}))
        recorder.log(2, {"eval/loss": 3.0})
    assert loggers.heard == [
        "begin",
        (1, {"loss": 2.0, "lr/text": 0.5}),
        (2, {"loss": 1.0, "lr/text": 0.5}),
        (2, {"eval/loss": 3.0}),
        (2, {"summary/first_loss": 2.0, "summary/last_loss": 1.0}),
        "completed",
    ]
    out, err = capsys.readouterr()
    assert out.endswith("nothing is missing\n") and err.splitlines()[0] == "wandb is gone"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_run_that_never_began_is_not_told_to_loggers(tmp_path: Path) -> None:
    loggers = Heard()
    with pytest.raises(ValueError), Recorder(tmp_path, 1, {}, "seed: 0\n", loggers=loggers):
        raise ValueError("no device")
    assert "begin" not in loggers.heard


def test_what_is_said_before_there_is_progress(tmp_path: Path) -> None:
    said: list[str] = []
    with Recorder(tmp_path, 1, {}, "seed: 0\n", say=said.append) as recorder:
        recorder.say("loading weights")
        recorder.begin(1)
        recorder.say("a note")
    assert said == ["loading weights"]


def test_a_slow_rank_is_named_on_the_terminal_and_in_the_summary(tmp_path: Path) -> None:
    said: list[str] = []
    with Recorder(tmp_path, 1, {}, "seed: 0\n", say=said.append) as recorder:
        for _ in range(2 * STEPS):
            recorder.compare_ranks({"text": [RankShare("text rank 0", 1.0, 4.0), RankShare("text rank 1", 1.5, 4.0)]})
    assert len(said) == 1 and said[0].startswith("warning: text rank 1 is slow: for 50 steps in a row ")
    assert summary(tmp_path)["stragglers"] == ["text rank 1"]


CALLED = " ".join(shell_command())
WORLD = {
    "vision": {"num_actors": 2, "data": 1, "ulysses": 2, "ring": 1, "tensor": 1, "expert": 1, "zero_stage": 1},
    "text": {"num_actors": 4, "data": 4, "ulysses": 1, "ring": 1, "tensor": 1, "expert": 2},
}


def test_a_completed_run():
    summary = Summary(
        status="completed",
        steps=60,
        first_loss=6.0,
        last_loss=2.5,
        median_step_s=0.4114,
        tokens_per_s=1532.4,
        idle_share={"vision": 0.714, "text": 0.3},
        world=WORLD,
        eval_loss={"shapes": 3.745, "letters": None, "all": 3.5},
        eval_accuracy={"shapes": 0.909, "letters": None},
        eval_exact={"shapes": 0.5, "letters": None},
    )
    assert closing_table(summary, "runs/x", "runs/x/checkpoints/step_60", "step_40: eval_loss 3.1000").splitlines() == [
        "status         completed",
        "steps          60",
        "loss           6.0000 → 2.5000",
        "median step    0.411 s",
        "speed          1532 tokens/s",
        "held out       shapes 3.7450 (accuracy 90.9%, exact 50.0%), letters -, all 3.5000",
        "best           step_40: eval_loss 3.1000",
        "idle           vision 71%, text 30% of the steps' time",
        "vision         2 actors: ulysses 2, zero_stage 1",
        "text           4 actors: data 4, expert 2",
        "run directory  runs/x",
        "metrics        runs/x/metrics.jsonl",
        "curves         tensorboard --logdir runs/x",
        "checkpoint     runs/x/checkpoints/step_60",
        f"export         {CALLED} export runs/x/checkpoints/step_60 OUT_DIR",
        f"ask            {CALLED} generate checkpoint=runs/x/checkpoints/step_60 prompt=TEXT",
    ]


def test_commands_of_what_comes_next_name_the_plugins() -> None:
    summary = Summary(status="completed", steps=1)
    table = closing_table(summary, "runs/x", "runs/x/checkpoints/step_1", plugins=["mine", "yours"])
    assert table.splitlines()[-2:] == [
        f"export         {CALLED} export --plugin=mine --plugin=yours runs/x/checkpoints/step_1 OUT_DIR",
        f"ask            {CALLED} generate checkpoint=runs/x/checkpoints/step_1 'plugins=[mine,yours]' prompt=TEXT",
    ]


def test_a_failed_run_without_a_checkpoint():
    summary = Summary(status="failed", error="rank 1 died\nTraceback …", steps=3, resumed_from="step_2")
    table = closing_table(summary, "runs/x", skipped_samples="2 (a.png, b.png)")
    assert "error            rank 1 died\n" in table
    assert "steps            3 (resumed from step_2)" in table
    assert "skipped samples  2 (a.png, b.png)" in table
    assert (
        "export" not in table
        and "generate" not in table
        and "held out" not in table
        and "best " not in table
        and "Traceback" not in table
    )


FIELDS = (
    "status error steps resumed_from restarts skipped_steps first_loss last_loss eval_loss eval_accuracy eval_exact "
    "median_step_s tokens_per_s idle_share world planned measured planned_ratio differs stragglers versions"
).split()
SUMMARY_STEPS = [
    StepMetrics(step=n, loss=4.0 / n, step_s=seconds, tokens=100) for n, seconds in ((1, 3.0), (2, 0.5), (3, 0.5))
]


def test_the_file_has_every_field_in_order(tmp_path):
    summary = Summary.of(SUMMARY_STEPS, status="completed", world={"text": {"num_actors": 2, "tensor": 2}})
    written = json.loads(write_summary(tmp_path, summary).read_text())
    assert list(written) == FIELDS
    assert written["world"] == {"text": {"num_actors": 2, "tensor": 2}}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_figures_of_the_steps():
    summary = Summary.of(SUMMARY_STEPS, status="completed")
    assert (summary.steps, summary.first_loss, summary.last_loss) == (3, 4.0, 4.0 / 3)
    assert (summary.median_step_s, summary.tokens_per_s) == (0.5, 75.0)


def test_steps_that_updated_nothing_are_counted():
    steps = [StepMetrics(step=n, skipped_steps=count) for n, count in ((1, 0), (2, 1), (3, 1))]
    assert Summary.of(steps, status="completed").skipped_steps == 1
    assert Summary.of([], status="failed").skipped_steps == 0


def test_idle_is_what_the_steps_have_beside_computing():
    steps = [
        StepMetrics(step=1, step_s=3.0, busy_s={"vision": 0.5, "text": 2.0}),
        StepMetrics(step=2, step_s=1.0, busy_s={"vision": 0.5, "text": 0.5}),
        StepMetrics(step=3, step_s=9.0),
    ]
    assert Summary.of(steps, status="completed").idle_share == {"vision": 0.75, "text": 0.375}
    assert Summary.of(SUMMARY_STEPS, status="completed").idle_share is None


def test_totals_hold_some_bytes_a_step():
    totals = StepTotals()
    tracemalloc.start()
    try:
        for n in range(1, 5001):
            totals.add(StepMetrics(step=n, loss=1.0 / n, step_s=0.5, tokens=100, busy_s={"a": 0.25, "b": 0.5}))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 64 * 5000
    summary = Summary.of(totals, status="completed")
    assert (summary.steps, summary.first_loss, summary.last_loss) == (5000, 1.0, 1 / 5000)
    assert (summary.median_step_s, summary.tokens_per_s, summary.idle_share) == (0.5, 200.0, {"a": 0.5, "b": 0.0})


def test_a_run_that_failed_before_its_first_step(tmp_path):
    path = write_summary(tmp_path / "new", Summary.of([], status="failed", error="no such file"))
    written = json.loads(path.read_text())
    assert (written["status"], written["error"]) == ("failed", "no such file")
    assert (written["steps"], written["last_loss"]) == (0, None)


def test_a_loss_that_is_no_number_stays_valid_json(tmp_path):
    summary = Summary.of([StepMetrics(step=1, loss=math.nan)], status="completed")
    text = write_summary(tmp_path, summary).read_text()
    assert json.loads(text, parse_constant=pytest.fail)["last_loss"] == "NaN"


def test_a_second_summary_replaces_the_first(tmp_path):
    write_summary(tmp_path, Summary(status="failed"))
    assert json.loads(write_summary(tmp_path, Summary(status="completed")).read_text())["status"] == "completed"


def test_versions_without_importing_the_packages():
    assert list(versions()) == ["python", "dhp", "torch", "transformers", "ray", "deepspeed"]
    assert versions()["torch"]


def test_later_attempts_append_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    before = time.time()
    for step in (0, 10):
        writer = EventWriter(tmp_path)
        writer.write(START, step)
        writer.write(SAVE, step + 5, 0.5, "saved")
        writer.close()
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write('{"event": "sa')
    found = read_events(tmp_path)
    assert [(one.event, one.step, one.seconds, one.text) for one in found] == [
        ("start", 0, None, ""),
        ("save", 5, 0.5, "saved"),
        ("start", 10, None, ""),
        ("save", 15, 0.5, "saved"),
    ]
    assert before <= found[0].time <= time.time()


def test_a_run_without_the_file_has_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []


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
