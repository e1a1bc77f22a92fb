"""Which checkpoint a run continues, and when it may."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.checkpoint.folder import finish_checkpoint, open_checkpoint
from dhp.checkpoint.resume import Start, find_start
from dhp.core.errors import CheckpointError

SETTINGS = {"seed": 1, "data.datasets": ["a"]}


def write(parent: Path, step: int) -> Path:
    about = {"step": step, "parts": [], "skipped_samples": 10 * step, "settings": SETTINGS, "data": {"step": step}}
    return finish_checkpoint(open_checkpoint(parent, step), about, {})


def test_never_begins_where_no_other_run_has_its_checkpoints(tmp_path: Path) -> None:
    open_checkpoint(tmp_path, 3)
    assert find_start("never", tmp_path) == Start() == Start(None, 0, 0, {})
    write(tmp_path, 3)
    with pytest.raises(CheckpointError, match="holds step_3 of another run, .* training.resume=auto to continue"):
        find_start("never", tmp_path)
    assert find_start("never", tmp_path, replaced=True) == Start()


def test_auto_takes_the_newest_complete_one_or_begins(tmp_path: Path) -> None:
    assert find_start("auto", tmp_path / "not there") == find_start("auto", tmp_path) == Start()
    for step in (9, 10):
        write(tmp_path, step)
    open_checkpoint(tmp_path, 11)
    assert find_start("auto", tmp_path) == Start(tmp_path / "step_10", 10, 100, SETTINGS, {"step": 10})


def test_a_path_is_a_checkpoint_or_a_run(tmp_path: Path) -> None:
    own, run = tmp_path / "own", tmp_path / "run"
    for step in (2, 4):
        write(run / "checkpoints", step)
    assert find_start(str(run), own).step == 4
    assert find_start(str(run / "checkpoints" / "step_2"), own).step == 2
    write(own, 3)
    with pytest.raises(CheckpointError, match=r"begins after step 2, but .* holds step_3 already"):
        find_start(str(run / "checkpoints" / "step_2"), own)
    assert find_start(str(run), own).step == 4


def test_one_that_does_not_say_where_its_data_stopped_cannot_be_resumed(tmp_path: Path) -> None:
    finish_checkpoint(open_checkpoint(tmp_path, 5), {"step": 5, "parts": []}, {})
    with pytest.raises(CheckpointError, match="step_5 does not say where it stopped in its data"):
        find_start("auto", tmp_path)


def test_the_same_settings_pass_and_others_are_named(tmp_path: Path) -> None:
    start = Start(tmp_path, 1, 0, SETTINGS)
    start.check(SETTINGS)
    start.check({"seed": 1})
    Start().check({"seed": 2})
    told = r"seed was 1 and is 2; data\.datasets was \['a'\] and is \['b'\]\. .* order"
    with pytest.raises(CheckpointError, match=told):
        start.check({**SETTINGS, "seed": 2, "data.datasets": ["b"]})
    with pytest.raises(CheckpointError, match="data.samples was None and is 3"):
        start.check({"data.samples": 3})


RECIPE = {"training.learning_rate": 1, "training.betas": [0.9], "data.packing": True, "data.on_bad_sample": "error"}


def test_a_recipe_stays_unless_it_is_asked_to_change(tmp_path: Path) -> None:
    start, free = Start(tmp_path / "step_4", 4, 0, {"recipe": RECIPE}), ("data.on_bad_sample",)
    start.check_recipe(RECIPE | {"data.on_bad_sample": "skip", "training.new": 1}, free, [])
    start.check_recipe(RECIPE | {"training.min_lr": 0.0}, free, [])  # as it was where nothing is said of it
    with pytest.raises(CheckpointError, match="training.min_lr"):
        start.check_recipe(RECIPE | {"training.min_lr": 1e-5}, free, [])
    other = RECIPE | {"training.learning_rate": 2, "training.betas": [0.8]}
    with pytest.raises(CheckpointError, match="training.learning_rate was 1 and is 2; training.betas was") as caught:
        start.check_recipe(other, free, [])
    message = str(caught.value)
    assert "learning rate follows one curve" in message and "averages of gradients so far" in message
    assert "training.resume_changes=[training.learning_rate,training.betas]" in message
    start.check_recipe(other, free, ["training"])
    start.check_recipe(other, free, ["training.learning_rate", "training.betas"])
    with pytest.raises(CheckpointError, match="data.packing was True and is False. Reason: the samples that are left"):
        start.check_recipe(RECIPE | {"data.packing": False}, free, ["training", "data.packin"])
    Start().check_recipe(other, free, [])
    Start(tmp_path / "step_4", 4).check_recipe(other, free, [])  # of a release that kept none


def test_parts_that_the_checkpoint_has_not_are_refused(tmp_path: Path) -> None:
    start = Start(tmp_path / "step_4", 4, parts=("vision", "text"))
    start.check({}, ["text", "vision"])
    with pytest.raises(CheckpointError, match=r"parts was \['text', 'vision'\] and is \['text'\]. Reason: a check"):
        start.check({}, ["text"])


def test_what_has_changed_is_said_by_key(tmp_path: Path) -> None:
    layout = {"text.tensor": 2, "text.dtype": "float32"}
    start = Start(tmp_path / "step_4", 4, 0, {"recipe": {"same": 1, "other": 2}, "layout": layout})
    assert start.changes({"same": 1, "other": 5, "new": 6}, layout | {"text.tensor": 1}) == [
        "new was None up to step 4, and is 6 from there on",
        "other was 2 up to step 4, and is 5 from there on",
        "else the recipe is that of step_4",
        "another layout than the checkpoint's, whose tensors are cut anew: text.tensor 2 → 1",
    ]
    assert Start(tmp_path / "step_4", 4).changes({"new": 6}, layout) == Start().changes({"new": 6}, layout) == []
