"""Checkpoints behind the steps: one at a time, by steps and by the clock, and none that fails ends the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dhp.checkpoint.folder import Unfinished, checkpoints, read_about
from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.core.errors import CheckpointError, ModelError, PartFailed
from dhp.core.reports import SavedShare, WrittenFile
from dhp.step.stages import EngineProtocol
from dhp.trainer.saving import Saver
from dhp.trainer.session import DataPlan

PLAN = DataPlan(6, frozenset(), {"seed": 0}, 1, 1)


class Ranks:
    """The actors of one stage: they write a file at once, and say that they did when they are `done`."""

    def __init__(self, part: str) -> None:
        self.spec, self.group = SimpleNamespace(part=part), self
        self.done, self.error, self.calls = True, None, list[Any]()

    def execute_all_async(self, method: Callable[..., Any], *arguments: Any, returns: int = 1) -> list[list[Any]]:
        self.calls.append((method.__name__, arguments[-1]))
        if method is EngineProtocol.save:
            self.folder = Path(arguments[0])
            self.folder.mkdir(parents=True)
            (self.folder / "rank_00000.json").write_text("{}")
            return [[]]
        done = self.done or arguments[0]
        return [[SavedShare(done, (WrittenFile("rank_00000.json", 2, 1),) if done else (), self.error)]]


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("dhp.trainer.saving.time", found)
    monkeypatch.setattr("dhp.trainer.saving.wait_all", lambda watched, timeout_s: True)
    monkeypatch.setattr("dhp.trainer.saving.auxiliary_files", lambda name: [])
    return found


def saver_of(folder: Path, *overrides: str) -> tuple[Saver, Ranks, list[str]]:
    ranks, lines = Ranks("text"), list[str]()
    config = resolve(compose_config("tiny", overrides=[f"training.checkpoint_dir={folder}", *overrides]))
    session = SimpleNamespace(
        config=config,
        stages={"text": ranks},
        graph=SimpleNamespace(parts=lambda: ["text"]),
        take_watched=list,
        values=list,
        data_state=lambda step: {"step": step},
    )
    return Saver(session, lines.append, Unfinished()), ranks, lines  # type: ignore[arg-type]


def test_a_models_folder_that_is_gone_costs_no_checkpoint(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    monkeypatch.setattr("dhp.trainer.saving.auxiliary_files", lambda name: [file])
    saver, _, _ = saver_of(tmp_path / "checkpoints")
    file.unlink()
    assert (saver.save(1, PLAN, 0) / "model" / "config.json").read_text() == "{}"


@pytest.mark.parametrize("error", [OSError("disk"), ValueError("value"), ModelError("model")])
def test_no_reason_to_fail_ends_the_run(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    saver, _, lines = saver_of(tmp_path)
    first = saver.save(1, PLAN, 0)

    def fail(*_: object) -> Path:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("dhp.trainer.saving.finish_checkpoint", fail)
        with pytest.raises(CheckpointError, match=f"no checkpoint after step 2: {error}"):
            saver.save(2, PLAN, 0)
    assert saver.newest == first and first.is_dir() and "The run goes on" in lines[-1]
    assert saver.save(3, PLAN, 0).name == "step_3"


def test_one_is_written_behind_the_steps(tmp_path: Path, clock: Clock) -> None:
    saver, ranks, lines = saver_of(tmp_path, "training.save_steps=2")
    assert [step for step in range(1, 7) if saver.is_due(step, PLAN)] == [2, 4, 6]
    assert saver.ask() is None
    ranks.done = False
    saving = saver.begin(2)
    assert saving is not None and saver.busy and ranks.calls == [("save", True)]
    saver.staged(saving, PLAN, skipped=3)
    saver.look(saver.ask())
    assert saver.busy and saver.newest is None
    ranks.done, clock.now = True, 1.5
    asked = saver.ask()
    saver.look(asked)
    assert not saver.busy and saver.has(2) and not saver.has(4)
    about = read_about(tmp_path / "step_2")
    assert (about["step"], about["skipped_samples"], about["data"], about["settings"]) == (2, 3, {"step": 2}, PLAN.kept)
    assert about["files"] == {"text/rank_00000.json": {"bytes": 2, "crc32": 1}}
    assert lines == ["step_2 is saved: 1.5 s, of which training waited 0.00 s"]
    saver.look(asked)  # what was asked with another step
    assert len(lines) == 1


def test_minutes_count_from_the_one_before(tmp_path: Path, clock: Clock) -> None:
    saver, _, _ = saver_of(tmp_path, "training.save_minutes=2", "training.save_final=false")
    clock.now = 119.0
    assert not saver.is_due(1, PLAN)
    clock.now = 120.0
    assert saver.is_due(1, PLAN)
    saving = saver.begin(1)
    assert saving is not None and not saver.is_due(2, PLAN)
    clock.now = 240.0
    assert saver.is_due(3, PLAN)


def test_a_disk_that_is_full_ends_nothing_before_the_end(tmp_path: Path, clock: Clock) -> None:
    saver, ranks, lines = saver_of(tmp_path, "training.save_steps=2")
    ranks.error = "rank_00000.safetensors cannot be written (No space left on device)"
    saving = saver.begin(2)
    assert saving is not None
    saver.staged(saving, PLAN, 0)
    saver.look(saver.ask())
    assert not saver.busy and saver.newest is None and not list(tmp_path.iterdir())
    assert lines[-1].startswith("warning: there is no checkpoint after step 2: rank_00000.safetensors cannot be")
    with pytest.raises(CheckpointError, match="training is done, and there is no checkpoint after step 6: rank_00000"):
        saver.require(6)
    ranks.error = None
    saving = saver.begin(4)
    assert saving is not None
    saver.staged(saving, PLAN, 0)
    saver.finish()
    saver.require(4)
    assert [one.name for one in checkpoints(tmp_path)] == ["step_4"]


def test_a_directory_that_cannot_be_made_ends_nothing(tmp_path: Path, clock: Clock) -> None:
    saver, ranks, lines = saver_of(tmp_path, "training.save_steps=2")
    (tmp_path / "step_2").mkdir()
    (tmp_path / "step_2" / "of_the_user").touch()
    assert saver.begin(2) is None and not saver.busy and not ranks.calls
    assert "step_2 is there, without a checkpoint.json" in lines[-1]
    assert (tmp_path / "step_2" / "of_the_user").exists()


def test_ranks_that_do_not_finish_are_named(tmp_path: Path, clock: Clock) -> None:
    saver, ranks, _ = saver_of(tmp_path, "training.save_timeout_s=30")
    ranks.done = False
    saving = saver.begin(2)
    assert saving is not None
    saver.staged(saving, PLAN, 0)
    clock.now = 30.0
    saver.look(saver.ask())
    clock.now = 30.1
    with pytest.raises(PartFailed, match=r"text rank 0 did not finish writing .*step_2.partial in training.save"):
        saver.look(saver.ask())


def test_one_that_is_asked_for_is_there_when_it_returns(tmp_path: Path, clock: Clock) -> None:
    saver, ranks, _ = saver_of(tmp_path)
    assert saver.save(3, PLAN, 0) == tmp_path / "step_3" and ranks.calls == [("save", False), ("saved", True)]
    ranks.error = "no room"
    with pytest.raises(CheckpointError, match="there is no checkpoint after step 4: no room"):
        saver.save(4, PLAN, 0)


def test_what_training_waits_is_that_of_each_checkpoint(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying, and waiting for the end of the writing; the next one begins anew."""

    def wait(watched: object, timeout_s: float) -> bool:
        clock.now += 0.25
        return True

    saver, ranks, _ = saver_of(tmp_path, "training.save_steps=2")
    noted: list[tuple[str, int, float]] = []
    saver._note = lambda event, step, seconds, text: noted.append((event, step, seconds))
    monkeypatch.setattr("dhp.trainer.saving.wait_all", wait)
    ranks.done = False
    for step in (2, 4):
        saving = saver.begin(step)
        assert saving is not None
        saver.staged(saving, PLAN, 0)
        assert saver.finish() == 0.25 and saver.finish() == 0.0
    assert noted == [("save", 2, 0.5), ("save", 4, 0.5)]
