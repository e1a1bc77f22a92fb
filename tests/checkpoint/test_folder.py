"""Folders of checkpoints and features: rotation, resuming."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
import torch

from dhp.checkpoint.feature_folder import FeatureFolder
from dhp.checkpoint.folder import (
    ABOUT,
    Best,
    checkpoints,
    find_checkpoint,
    finish_checkpoint,
    mark_best,
    open_checkpoint,
    read_about,
    read_best,
    read_model_files,
    remove_old,
)
from dhp.checkpoint.resume import Start, find_start
from dhp.core.batch import Features
from dhp.core.errors import CheckpointError, ConfigError
from dhp.core.reports import WrittenFile


def write(parent: Path, step: int) -> Path:
    config = parent / "config.json"
    config.write_text("{}")
    return finish_checkpoint(open_checkpoint(parent / "checkpoints", step), {"step": step}, read_model_files([config]))


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    for step in (9, 10, 2):
        write(tmp_path, step)
    open_checkpoint(tmp_path / "checkpoints", 30)  # begun, never finished
    newest = tmp_path.absolute() / "checkpoints" / "step_10"
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path / "checkpoints") == find_checkpoint(newest) == newest
    about = read_about(newest)
    assert about.pop("crc32") > 0
    assert about == {"format": 2, "step": 10, "files": {"model/config.json": {"bytes": 2, "crc32": crc32(b"{}")}}}
    assert (newest / "model" / "config.json").is_file()


def test_a_complete_one_is_never_replaced(tmp_path: Path) -> None:
    done = write(tmp_path, 3)
    with pytest.raises(CheckpointError, match="step_3 is complete already: this step was saved before, or another run"):
        open_checkpoint(tmp_path / "checkpoints", 3)
    assert read_about(done)["step"] == 3 and (done / "model" / "config.json").read_text() == "{}"


def test_a_template_of_ones_own_goes_along(tmp_path: Path) -> None:
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        (tmp_path / name).write_text('{"chat_template": "theirs", "a": 1}')
    (tmp_path / "processor_config.json").write_text('{"chat_template": "theirs"}')
    (tmp_path / "config.json").write_text('{"chat_template":  "no tokenizer\'s"}')
    files = sorted(tmp_path.iterdir())
    model = (
        finish_checkpoint(open_checkpoint(tmp_path / "c", 1), {"step": 1}, read_model_files(files, "ours")) / "model"
    )
    assert {file.name: file.read_text() for file in model.iterdir()} == {
        "chat_template.jinja": "ours",
        "config.json": '{"chat_template":  "no tokenizer\'s"}',
        "processor_config.json": "{}\n",
        "tokenizer_config.json": '{\n  "a": 1\n}\n',
    }


def test_two_runs_that_write_the_same_step(tmp_path: Path) -> None:
    first = open_checkpoint(tmp_path, 3)
    finish_checkpoint(first, {"step": 3}, {})
    first.mkdir()
    with pytest.raises(CheckpointError, match="another run writes to the same training.checkpoint_dir"):
        finish_checkpoint(first, {"step": 3}, {})


def test_what_was_never_finished_is_written_anew(tmp_path: Path) -> None:
    (open_checkpoint(tmp_path, 3) / "old").touch()
    (tmp_path / "step_3").mkdir()
    assert not (finish_checkpoint(open_checkpoint(tmp_path, 3), {"step": 3}, {}) / "old").exists()


def test_what_has_lost_its_description_is_never_replaced(tmp_path: Path) -> None:
    lost = write(tmp_path, 3)
    (lost / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match="step_3 is there, without a checkpoint.json: .*Move it away"):
        open_checkpoint(tmp_path / "checkpoints", 3)
    assert (lost / "model" / "config.json").read_text() == "{}"


def test_a_file_that_a_rank_wrote_elsewhere_is_missed(tmp_path: Path) -> None:
    folder = open_checkpoint(tmp_path, 1)
    (folder / "text").mkdir()
    (folder / "text" / "rank_00000.json").write_text("{}")
    there, elsewhere = WrittenFile("text/rank_00000.json", 2, 7), WrittenFile("text/rank_00001.json", 2, 7)
    with pytest.raises(CheckpointError, match="rank_00001.json is not there, .* not the same directory on all nodes"):
        finish_checkpoint(folder, {"step": 1}, {}, written=[there, elsewhere])
    folder = open_checkpoint(tmp_path, 1)
    (folder / "text").mkdir()
    (folder / "text" / "rank_00000.json").write_text("{}")
    assert read_about(finish_checkpoint(folder, {"step": 1}, {}, written=[there]))["files"] == {
        "text/rank_00000.json": {"bytes": 2, "crc32": 7}
    }


def test_no_checkpoint_is_said(tmp_path: Path) -> None:
    open_checkpoint(tmp_path / "checkpoints", 1)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is no directory"):
        find_checkpoint(tmp_path / "nowhere")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"runs/frist is no directory; did you mean .*/runs/first\?$"):
        find_checkpoint(tmp_path / "runs" / "frist")


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ({"parts": ["/other/run/step_40/vision"]}, "is no part of a model"),
        ({"parts": ["text", "../../../run/step_40/text"]}, "is no part of a model"),
        ({"parts": [["text"]]}, "is no part of a model"),
        ({"parts": [{}]}, "is no part of a model"),
        ({"files": {"/etc/shadow": 1}}, "/etc/shadow"),
        ({"files": {"text/../../a": 1}}, "text/../../a"),
        ({"files": {"a\0b": 1}}, "files has"),
        ({"files": {"a": -1}}, "of -1"),
        ({"files": {"a": "1"}}, "of '1'"),
        ({"step": True}, "step should be int"),
        ({"step": -3}, "step should be int"),
    ],
)
def test_what_reaches_out_of_a_checkpoint_is_damage(tmp_path: Path, about: dict[str, object], told: str) -> None:
    (tmp_path / "checkpoint.json").write_text(json.dumps({"step": 1, "parts": ["text"], "files": {"a/b": 1}} | about))
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged") as caught:
        read_about(tmp_path, ("step", "parts", "files"))
    assert told in str(caught.value)


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


SETTINGS = {"seed": 1, "data.datasets": ["a"]}


def write_step(parent: Path, step: int) -> Path:
    about = {"step": step, "parts": [], "skipped_samples": 10 * step, "settings": SETTINGS, "data": {"step": step}}
    return finish_checkpoint(open_checkpoint(parent, step), about, {})


def test_never_begins_where_no_other_run_has_its_checkpoints(tmp_path: Path) -> None:
    open_checkpoint(tmp_path, 3)
    assert find_start("never", tmp_path) == Start() == Start(None, 0, 0, {})
    write_step(tmp_path, 3)
    with pytest.raises(CheckpointError, match="holds step_3 of another run, .* training.resume=auto to continue"):
        find_start("never", tmp_path)
    assert find_start("never", tmp_path, replaced=True) == Start()


def test_auto_takes_the_newest_complete_one_or_begins(tmp_path: Path) -> None:
    assert find_start("auto", tmp_path / "not there") == find_start("auto", tmp_path) == Start()
    for step in (9, 10):
        write_step(tmp_path, step)
    open_checkpoint(tmp_path, 11)
    assert find_start("auto", tmp_path) == Start(tmp_path / "step_10", 10, 100, SETTINGS, {"step": 10})


def test_a_path_is_a_checkpoint_or_a_run(tmp_path: Path) -> None:
    own, run = tmp_path / "own", tmp_path / "run"
    for step in (2, 4):
        write_step(run / "checkpoints", step)
    assert find_start(str(run), own).step == 4
    assert find_start(str(run / "checkpoints" / "step_2"), own).step == 2
    write_step(own, 3)
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


KEY, OTHER = "ab" * 32, "cd" * 32


def made(key: str = KEY, fill: float = 1.0) -> Features:
    rows = {"embeddings": torch.rand(3, 4), "deepstack.0": torch.full((3, 4), fill, dtype=torch.bfloat16)}
    return Features(key, "[[1, 2, 6], null, [], []]", rows)


def file_of(folder: Path, key: str = KEY) -> Path:
    return folder / key[:2] / f"{key}.safetensors"


def same(found: Features | None, wanted: Features) -> bool:
    if found is None or (found.key, found.about) != (wanted.key, wanted.about):
        return False
    ours, theirs = found.tensors or {}, wanted.tensors or {}
    alike = lambda name: ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name])
    return ours.keys() == theirs.keys() and all(map(alike, theirs))


def test_what_is_kept_comes_back_to_the_bit(tmp_path: Path) -> None:
    kept, folder = made(), FeatureFolder(tmp_path)
    assert folder.load(KEY) is None and folder.size(KEY) == folder.nbytes() == 0
    folder.save(kept)
    assert same(folder.load(KEY), kept) and folder.load(OTHER) is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file_of(tmp_path)]
    assert folder.nbytes() == folder.size(KEY) == file_of(tmp_path).stat().st_size


def test_columns_of_a_larger_tensor_are_kept_as_they_are(tmp_path: Path) -> None:
    rows = torch.rand(4, 6)[:, ::2]
    FeatureFolder(tmp_path).save(Features(KEY, "", {"embeddings": rows}))
    found = FeatureFolder(tmp_path).load(KEY)
    assert found is not None and torch.equal(found.tensors["embeddings"], rows)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[:-5],
    "in its numbers": lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
    "in what it says of the picture": lambda content: content.replace(b"[[1, 2, 6]", b"[[1, 3, 4]"),
    "of another key": lambda content: content.replace(KEY.encode(), OTHER.encode()),
    "no length": lambda content: b"\xff" * 8 + content[8:],
    "no JSON": lambda content: content[:8] + b"?" + content[9:],
    "text": lambda content: b"not a file of tensors",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_not_there_and_is_replaced(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    folder, path = FeatureFolder(tmp_path), file_of(tmp_path)
    folder.save(made())
    whole = path.read_bytes()
    assert damage(whole) != whole
    path.write_bytes(damage(whole))
    assert folder.load(KEY) is None
    again = made(fill=2.0)
    folder.save(again)
    assert same(folder.load(KEY), again)


def test_a_file_under_the_name_of_another_key_is_not_read(tmp_path: Path) -> None:
    folder = FeatureFolder(tmp_path)
    folder.save(made())
    file_of(tmp_path, OTHER).parent.mkdir()
    file_of(tmp_path).rename(file_of(tmp_path, OTHER))
    assert folder.load(OTHER) is None


@pytest.mark.parametrize("key", ["../" + "a" * 61, "a" * 63, "AB" * 32, "a" * 63 + "/", "a" * 64 + "\n", ""])
def test_only_digests_become_paths(key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no key of features"):
        FeatureFolder(tmp_path).load(key)


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match=r"cannot be kept in .*: No space left on device\. Set data\.cache_features"):
        FeatureFolder(tmp_path).save(made())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = FeatureFolder(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be written: "):
        folder.check()
    with pytest.raises(ConfigError, match="cannot be read"):
        folder.load(KEY)


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    FeatureFolder(tmp_path / "new" / "one").check()
    assert list((tmp_path / "new" / "one").iterdir()) == []
