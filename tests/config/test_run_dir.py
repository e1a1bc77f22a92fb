"""A run's directory: never a silent overwrite, and only a run's own files are removed."""

import pytest

from dhp.config.run_dir import check_run_dir, make_run_dir
from dhp.config.schema import Config
from dhp.errors import ConfigError


@pytest.mark.parametrize("mark", ["config.yaml", "metrics.jsonl", "summary.json"])
def test_a_directory_that_holds_a_run_is_refused(tmp_path, mark):
    (tmp_path / mark).write_text("")
    with pytest.raises(ConfigError) as caught:
        check_run_dir(Config(run_dir=str(tmp_path)))
    for told in (f"run_dir={tmp_path} already holds a run ({mark})", "overwrite=false", "or overwrite=true"):
        assert told in str(caught.value)


def test_new_and_otherwise_used_directories_pass(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    check_run_dir(Config(run_dir=str(tmp_path)))
    assert make_run_dir(Config(run_dir=str(tmp_path / "a" / "b"))).is_dir()


def test_overwriting_removes_what_a_run_left_and_nothing_else(tmp_path):
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "trace.json", "notes.txt"):
        (tmp_path / name).write_text("")
    for name in ("tb", "logs", "checkpoints", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    make_run_dir(Config(run_dir=str(tmp_path), overwrite=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "notes.txt"]


def test_a_linked_directory_is_unlinked_not_emptied(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "checkpoints").symlink_to(kept)
    make_run_dir(Config(run_dir=str(run_dir), overwrite=True))
    assert (kept / "file").exists() and not (run_dir / "checkpoints").exists()


def test_a_file_in_its_place_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        check_run_dir(Config(run_dir=str(file)))
    with pytest.raises(ConfigError, match="cannot be created"):
        make_run_dir(Config(run_dir=str(file / "below")))


@pytest.mark.parametrize("resume", ["auto", "{run_dir}", "{run_dir}/checkpoints/step_2"])
def test_the_run_to_be_continued_may_be_there(tmp_path, resume):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("kept")
    config = Config(run_dir=str(run_dir))
    config.training.resume = resume.format(run_dir=run_dir)
    assert make_run_dir(config) == run_dir
    assert (run_dir / "metrics.jsonl").read_text() == "kept"
    config.overwrite = True
    with pytest.raises(ConfigError, match="overwrite=true would remove the checkpoints .* Set one of them only"):
        check_run_dir(config)


def test_a_run_continued_from_elsewhere_does_not_touch_another_one(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    config = Config(run_dir=str(tmp_path))
    config.training.resume = str(tmp_path.parent / "elsewhere")
    with pytest.raises(ConfigError, match="already holds a run"):
        check_run_dir(config)
