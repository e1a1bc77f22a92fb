"""Checkpoint directories: complete under their final name, or not there."""

from __future__ import annotations

import json
from pathlib import Path
from zlib import crc32

import pytest

from dhp.checkpoint.folder import find_checkpoint, finish_checkpoint, open_checkpoint, read_about, read_model_files
from dhp.core.errors import CheckpointError
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
    with pytest.raises(CheckpointError, match="step_3 is complete already: another run writes to the same"):
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
