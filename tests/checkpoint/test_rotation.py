"""Which checkpoints stay: so many newest ones, and the best, never less than a whole one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dhp.checkpoint.folder import ABOUT, Best, checkpoints, find_checkpoint, mark_best, read_best, remove_old
from dhp.core.errors import CheckpointError


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    for step in (1, 2, 3, 10):
        folder = tmp_path / f"step_{step}"
        folder.mkdir()
        (folder / ABOUT).write_text(json.dumps({"step": step}))
    (tmp_path / "step_11.partial").mkdir()
    return tmp_path


def test_the_newest_and_the_best_stay(parent: Path) -> None:
    best = Best(2, "eval_loss", 1.5)
    assert {path.name for path in remove_old(parent, 1, best)} == {"step_1", "step_3"}
    assert sorted(path.name for path in parent.iterdir()) == ["step_10", "step_11.partial", "step_2"]
    assert remove_old(parent, 1, best) == []


def test_of_a_link_the_link_goes(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Moved to a larger disk and linked back."""
    elsewhere = tmp_path_factory.mktemp("disk") / "step_1"
    (parent / "step_1").rename(elsewhere)
    (parent / "step_1").symlink_to(elsewhere)
    (parent / "step_2.removed").symlink_to(elsewhere)  # of an interrupted removal
    assert {path.name for path in remove_old(parent, 2, None)} == {"step_1", "step_2"}
    assert sorted(path.name for path in parent.iterdir()) == ["step_10", "step_11.partial", "step_3"]
    assert (elsewhere / ABOUT).is_file()


def test_a_digit_that_is_no_number_is_no_step(parent: Path) -> None:
    (parent / "step_\u00b2").mkdir()
    (parent / "step_\u00b2" / ABOUT).write_text("{}")
    assert [path.name for path in checkpoints(parent)] == ["step_10", "step_3", "step_2", "step_1"]


def test_without_a_best_one_the_newest_stay(parent: Path) -> None:
    remove_old(parent, 3, None)
    assert [path.name for path in checkpoints(parent)] == ["step_10", "step_3", "step_2"]


def test_the_link_leads_to_the_best_and_moves(parent: Path) -> None:
    mark_best(parent, Best(2, "eval_loss", 1.5))
    assert find_checkpoint(parent / "best").resolve() == parent / "step_2"
    mark_best(parent, Best(3, "eval_loss", 1.25))
    assert find_checkpoint(parent / "best").resolve() == parent / "step_3"
    assert read_best(parent, "eval_loss") == Best(3, "eval_loss", 1.25)
    names = [path.name for path in checkpoints(parent)]
    assert names == ["step_10", "step_3", "step_2", "step_1"]  # and is no other one


def test_a_best_one_by_another_metric_or_no_longer_there_is_none(parent: Path) -> None:
    assert read_best(parent, "eval_loss") is None
    mark_best(parent, Best(3, "eval_loss/a", 1.25))
    assert read_best(parent, "eval_loss") is None
    mark_best(parent, Best(7, "eval_loss", 1.25))
    assert read_best(parent, "eval_loss") is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"step": 3, "metric": "eval_loss", "value": 1, "more": 2}'])
def test_what_no_run_wrote_is_damage(parent: Path, content: str) -> None:
    (parent / "best.json").write_text(content)
    with pytest.raises(CheckpointError, match="best.json is damaged"):
        read_best(parent, "eval_loss")
