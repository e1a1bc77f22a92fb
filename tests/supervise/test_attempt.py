"""What a driver says of itself, and that it says nothing where nobody supervises it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.core.errors import PartFailed
from dhp.supervise.attempt import (
    VARIABLE,
    Attempt,
    ElasticLayout,
    ElasticLayouts,
    known_device,
    larger_layouts,
    restarts,
    tell_device,
    tell_layouts,
    tell_opened,
    tell_saved,
    tell_state,
    telling_end,
    this_attempt,
)


def test_nothing_is_said_without_a_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert this_attempt() is None and restarts() == 0
    tell_opened()
    tell_state("training")
    tell_saved(Path("step_1"))
    with telling_end():
        pass


def test_what_is_said_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Attempt(str(tmp_path), 3, 2)
    monkeypatch.setenv(VARIABLE, attempt.environment()[VARIABLE])
    assert this_attempt() == attempt and restarts() == 2
    assert (attempt.has_opened, attempt.state, attempt.checkpoint, attempt.verdict) == (False, "starting", None, None)
    tell_opened()
    tell_state("saving")
    tell_saved(Path("a/step_1"))
    assert (attempt.has_opened, attempt.state, attempt.checkpoint) == (True, "saving", "a/step_1")
    with pytest.raises(PartFailed), telling_end():
        raise PartFailed("first")
    attempt.ended(PartFailed("what followed from it"))
    verdict = attempt.verdict
    assert verdict is not None and (verdict.message, verdict.state, verdict.attempt) == ("first", "saving", 3)


def test_layouts_are_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    layouts = ElasticLayouts(ElasticLayout(2), (ElasticLayout(1, ("a=1", "b=[1,2]")),))
    tell_layouts(lambda: pytest.fail("nothing supervises it"))
    assert larger_layouts() == ()
    first, second = Attempt(str(tmp_path), 1, 0, asks_layouts=True), Attempt(str(tmp_path), 2, 1, (2,), "cuda")
    assert first.layouts is None and first.device_said is None and known_device() == ""
    monkeypatch.setenv(VARIABLE, first.environment()[VARIABLE])
    tell_layouts(lambda: layouts)
    assert first.layouts == layouts
    tell_device("cpu")
    assert first.device_said == "cpu" and known_device() == ""
    monkeypatch.setenv(VARIABLE, second.environment()[VARIABLE])
    tell_layouts(lambda: pytest.fail("they are known"))
    assert list(larger_layouts()) == [2] and known_device() == "cuda"


def test_a_stage_that_has_completed_is_no_end_of_a_curriculum(tmp_path: Path) -> None:
    attempt = Attempt(str(tmp_path), 1, 0)
    attempt.ended(None)
    attempt.opened()
    assert attempt.verdict is None


def test_a_folder_that_is_gone_fails_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    attempt = Attempt(str(file), 1, 0)
    attempt.in_state("training")
    assert attempt.ended(PartFailed("no")).restartable and attempt.verdict is None
