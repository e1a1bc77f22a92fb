"""The record of a run: written once, however and wherever the run ends."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dhp.core.errors import ConfigError, RecordError
from dhp.observe.metrics import StepMetrics
from dhp.observe.ranks import STEPS, RankShare
from dhp.observe.recorder import Recorder


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
