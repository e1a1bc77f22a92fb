"""A run's directory: never a silent overwrite, and only a run's own files are removed."""

import json
from pathlib import Path

import pytest

from dhp.config.command_line import to_yaml
from dhp.config.data import DatasetEntry
from dhp.config.run_dir import check_run_dir, make_run_dir, replaces_checkpoints, run_directory
from dhp.config.schema import Config
from dhp.core.errors import ConfigError


def leave_run(run_dir: Path, status: str = "completed", metrics: str = '{"step": 1}\n') -> Path:
    """What a run leaves as its record."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(Config(run_dir=str(run_dir))))
    (run_dir / "metrics.jsonl").write_text(metrics)
    (run_dir / "summary.json").write_text(json.dumps({"status": status}))
    return run_dir


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
    leave_run(tmp_path)
    for name in ("trace.json", "notes.txt"):
        (tmp_path / name).write_text("")
    for name in (
        "tb",
        "logs",
        "mine",
        *(f"checkpoints/{name}" for name in ("step_2", "step_4.partial", "step_1.removed", "pretrained")),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("")
    ranks = (
        "vision-0.log",
        "text-12.log",
        "text.1-0.log",
        "data.log",
        "data-1.log",
        "text-0.stacks",
        "text.1-0.heartbeat",
    )
    for name in (*ranks, "slurm-1.log"):
        (tmp_path / "logs" / name).write_text("")
    for name in ("loggers", "wandb", "swanlog"):
        (tmp_path / name).mkdir()
    for name in ("swanlab.log", "swanlab.id", "notes"):  # wandb's folder was not this run's
        (tmp_path / "loggers" / name).write_text("")
    (tmp_path / "checkpoints" / "best").symlink_to("step_2")
    (tmp_path / "checkpoints" / "best.json").write_text("{}")
    config = Config(run_dir=str(tmp_path), overwrite=True)
    config.training.checkpoint_dir = str(tmp_path / "checkpoints")
    assert replaces_checkpoints(config)
    make_run_dir(config)
    left = ["checkpoints", "loggers", "logs", "mine", "notes.txt", "wandb"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert [path.name for path in (tmp_path / "loggers").iterdir()] == ["notes"]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["file", "slurm-1.log"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["pretrained"]


def test_a_linked_directory_is_unlinked_not_emptied(tmp_path):
    kept = tmp_path / "kept"
    (kept / "step_2").mkdir(parents=True)
    run_dir = leave_run(tmp_path / "run")
    (run_dir / "checkpoints").symlink_to(kept)
    make_run_dir(Config(run_dir=str(run_dir), overwrite=True))
    assert (kept / "step_2").exists() and not (run_dir / "checkpoints").exists()


@pytest.mark.parametrize(("folder", "file"), [("logs", "vision.0.log"), ("loggers", "wandb.id")])
def test_logs_that_are_a_link_are_unlinked_not_emptied(tmp_path, folder, file):
    other = tmp_path / "other"
    other.mkdir()
    (other / file).write_text("of another run")
    run_dir = leave_run(tmp_path / "run")
    (run_dir / folder).symlink_to(other)
    make_run_dir(Config(run_dir=str(run_dir), overwrite=True))
    assert (other / file).read_text() == "of another run" and not (run_dir / folder).exists()


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_logs_are_not_written_into_what_a_link_leads_to(tmp_path, resume):
    other = tmp_path / "other"
    other.mkdir()
    run_dir = leave_run(tmp_path / "run") if resume == "auto" else tmp_path / "new"
    run_dir.mkdir(exist_ok=True)
    (run_dir / "logs").symlink_to(other)
    config = Config(run_dir=str(run_dir))
    config.training.resume = resume
    with pytest.raises(ConfigError, match=f"{run_dir}/logs is a link.*into what it leads to \\({other}\\)"):
        check_run_dir(config)
    assert (run_dir / "logs").is_symlink() and list(other.iterdir()) == []
    (run_dir / "logs").unlink()
    (run_dir / "logs").mkdir()
    check_run_dir(config)


def test_what_no_run_left_is_not_removed(tmp_path):
    for name in ("checkpoints/pretrained", "checkpoints/step_2", "logs", "tb"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("")
    config = Config(run_dir=str(tmp_path), overwrite=True)
    config.training.checkpoint_dir = str(tmp_path / "checkpoints")
    assert not replaces_checkpoints(config)
    make_run_dir(config)
    assert len(list(tmp_path.rglob("file"))) == 4


@pytest.mark.parametrize("text", ["learning_rate: 0.1", "- a list", "{", ""])
def test_a_configuration_that_no_run_wrote_is_no_mark(tmp_path, text):
    leave_run(tmp_path)
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="config.yaml, metrics.jsonl, summary.json but no run's record"):
        make_run_dir(Config(run_dir=str(tmp_path), overwrite=True))
    assert (tmp_path / "config.yaml").read_text() == text


def test_a_copied_configuration_alone_is_no_run(tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(Config(run_dir="elsewhere")))
    with pytest.raises(ConfigError, match="overwrite=true replaces runs only"):
        make_run_dir(Config(run_dir=str(tmp_path), overwrite=True))


@pytest.mark.parametrize("overwrite", [True, False])
def test_an_empty_run_dir_is_refused(overwrite):
    with pytest.raises(ConfigError, match="run_dir is empty.*shell variable"):
        check_run_dir(Config(run_dir="", overwrite=overwrite))


@pytest.mark.parametrize(
    ("key", "where"),
    [
        ("vision.model_name", "checkpoints/step_2/model"),
        ("text.model_name", "checkpoints/step_2.partial"),
        ("training.checkpoint_dir", "tb/deep"),
        ("tiny_assets", "tb/assets"),
        ("data.cache_dir", "tb/lengths"),
        ("data.cache_features", "tb/features"),
        ("memory.cache_dir", "tb/costs"),
        ("data.data_registry.mine.annotation_path", "checkpoints/step_4/set.json"),
        ("data.data_registry.mine.data_path", "checkpoints/step_2"),
    ],
)
def test_what_the_run_reads_is_not_removed(tmp_path, key, where):
    run_dir = leave_run(tmp_path / "run")
    (run_dir / where).mkdir(parents=True)
    config = Config(run_dir=str(run_dir), overwrite=True)
    config.data.datasets, config.data.data_registry = ["mine%50"], {"mine": DatasetEntry()}
    holder = config
    *sections, name = key.split(".")
    for section in sections:
        holder = holder[section] if isinstance(holder, dict) else getattr(holder, section)
    setattr(holder, name, str(run_dir / where))
    with pytest.raises(ConfigError, match=f"^{key}=.*{where} lies in {run_dir}.* is removed"):
        make_run_dir(config)
    assert (run_dir / where).is_dir() and (run_dir / "summary.json").is_file()


def test_what_is_read_through_a_link_that_is_removed_is_refused_too(tmp_path):
    (tmp_path / "kept" / "step_2").mkdir(parents=True)
    run_dir = leave_run(tmp_path / "run")
    (run_dir / "checkpoints").symlink_to(tmp_path / "kept")
    config = Config(run_dir=str(run_dir), overwrite=True)
    config.training.resume = str(run_dir / "checkpoints" / "step_2")
    with pytest.raises(ConfigError, match="training.resume=.* lies in "):
        make_run_dir(config)


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_a_run_that_ended_before_its_first_step_blocks_nothing(tmp_path, status):
    leave_run(tmp_path, status, metrics="")
    (tmp_path / "logs").mkdir()
    for name in ("vision-0.log", "data.log", "slurm-1.log"):
        (tmp_path / "logs" / name).write_text("")
    make_run_dir(Config(run_dir=str(tmp_path)))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["slurm-1.log"]


def test_a_run_that_is_not_known_to_have_ended_is_kept(tmp_path):
    leave_run(tmp_path, metrics="")
    (tmp_path / "summary.json").unlink()
    with pytest.raises(ConfigError, match="already holds a run"):
        check_run_dir(Config(run_dir=str(tmp_path)))


def test_a_refused_run_leaves_no_directory_and_a_failed_one_its_record(tmp_path):
    for error, left in ((ConfigError, False), (ValueError, True)):
        config = Config(run_dir=str(tmp_path / error.__name__))
        with pytest.raises(error), run_directory(config) as run_dir:
            leave_run(run_dir, "failed", metrics="")
            (run_dir / "logs").mkdir()
            raise error("refused")
        assert run_dir.exists() == left
    with pytest.raises(ConfigError), run_directory(Config(run_dir=str(tmp_path))):
        raise ConfigError("refused")
    assert tmp_path.is_dir()


def test_a_directory_that_a_run_writes_is_refused_and_left_as_it_is(tmp_path):
    run_dir, elsewhere = leave_run(tmp_path / "run", "failed", metrics=""), tmp_path / "checkpoints"
    config = Config(run_dir=str(run_dir), overwrite=True)
    config.training.checkpoint_dir = str(elsewhere)
    other = Config(run_dir=str(tmp_path / "other"))
    other.training.checkpoint_dir = str(elsewhere)
    with run_directory(config):
        for second, told in (
            (config, f"run_dir={run_dir} is in"),
            (other, f"training.checkpoint_dir={elsewhere} is in"),
        ):
            with pytest.raises(ConfigError, match=told), run_directory(second):
                make_run_dir(second)
        assert sorted(path.name for path in run_dir.iterdir()) == [
            *(".running.json", "config.yaml", "metrics.jsonl", "summary.json")
        ]
    assert not elsewhere.exists() and not (tmp_path / "other").exists()
    with run_directory(other):
        pass


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
