"""Stages one after another; balanced rows and a resume."""

import json
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForImageTextToText

from dhp.__main__ import main as command
from dhp.config.command_line import compose_config
from dhp.config.schema import Config, StageEntry
from dhp.core.errors import CheckpointError, ConfigError
from dhp.core.locks import locked
from dhp.observe.metrics import StepMetrics
from dhp.train_ray import main
from dhp.trainer.curriculum import run_curriculum
from tests.helpers.runs import ONE_ACTOR_EACH, Outcome, tiny, train
from tests.trainer.test_failures import wait_for_steps

CHANGED = "+stages.two.settings.training.resume_changes=[training.warmup_steps]"
FIRST = "stages.one={recipe: alignment, settings: {training: {max_steps: 2, learning_rate: 0.01}}}"
SECOND = (
    "stages.two={recipe: context_extension, rope_theta: 5.0e4, max_positions: 8192, "
    "settings: {training: {max_steps: 300, save_steps: 1, save_total_limit: 2}}}"
)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForImageTextToText.from_pretrained(folder).state_dict()


@pytest.mark.slow
def test_a_course_goes_on_in_the_stage_that_was_stopped(tiny_assets: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    arguments = tiny(tiny_assets, root, *ONE_ACTOR_EACH, f"+{FIRST}", f"+{SECOND}")

    def interrupt(process: subprocess.Popen[str]) -> None:
        wait_for_steps(root / "2_two", 2, process)
        process.send_signal(signal.SIGINT)

    stopped = train(*arguments, meanwhile=interrupt, private_ray=True)
    assert stopped.status == 130 and stopped.left == (), stopped.stderr
    assert "the curriculum stops in stage 2, two; the same command with this run_dir goes on there" in stopped.stdout
    assert ["steps" in one for one in json.loads((root / "stages.json").read_text()).values()] == [True, False]
    done = len((root / "2_two" / "metrics.jsonl").read_text().splitlines())
    again = train(*arguments, f"stages.two.settings.training.max_steps={done + 1}", CHANGED)
    assert again.status == 0 and again.left == (), again.stderr
    assert "stage 1 of 2, one: done" in again.stdout and "continuing after step" in again.stdout
    told = json.loads((root / "stages.json").read_text())
    assert [(name, one["steps"]) for name, one in told.items()] == [("1_one", 2), ("2_two", done + 1)]
    _check_models(tiny_assets / "model", root, tmp_path)


def _check_models(model: Path, root: Path, folder: Path) -> None:
    """The second stage begins with what the first one ended with; what it trained is in its export."""
    before, start = weights(model), weights(root / "2_two" / "start")
    assert command(["export", str(root / "1_one"), str(folder / "one")]) == 0
    for name, value in weights(folder / "one").items():
        assert torch.equal(start[name], value)
    changed = {name for name in before if not torch.equal(before[name], start[name])}
    assert changed == {name for name in before if "merger" in name}
    assert command(["export", str(root / "2_two"), str(folder / "two")]) == 0
    text = AutoConfig.from_pretrained(folder / "two").get_text_config()
    assert (text.rope_parameters["rope_theta"], text.max_position_embeddings) == (5e4, 8192)
    end = weights(folder / "two")
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in changed} <= {
        *("q_proj", "k_proj", "v_proj", "o_proj", "embed_tokens", "norm", "input_layernorm"),
        "post_attention_layernorm",
    }
    assert any("q_proj" in name for name in changed) and not any("visual" in name for name in changed)


def test_a_mistake_in_a_later_stage_is_told_before_the_first_begins(tiny_assets: Path, tmp_path: Path) -> None:
    config = compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}"])
    wrong = StageEntry("context_extension", {"vision": {"zero_stage": 3, "zero_engine": "deepspeed"}})
    config.stages = {"one": StageEntry("alignment"), "two": wrong}
    with pytest.raises(ConfigError, match="stage 2 of 2, two: vision.zero_stage=3 .* with nothing of vision trained"):
        run_curriculum(config, lambda _: pytest.fail("it began"), lambda _: None)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_first_stage_may_raise_positions_without_a_copy_of_its_weights(tiny_assets: Path, tmp_path: Path) -> None:
    config = compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}"])
    config.stages = {"far": StageEntry(rope_theta=7e4)}
    begun = []

    def stop(prepared) -> None:  # type: ignore[no-untyped-def]
        begun.append(prepared.text.model_name)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_curriculum(config, stop, lambda _: None)
    start = tmp_path / "run" / "1_far" / "start"
    assert begun == [str(start)]
    assert AutoConfig.from_pretrained(start).get_text_config().rope_parameters["rope_theta"] == 7e4
    assert (start / "model.safetensors").is_symlink()
    model = AutoConfig.from_pretrained(tiny_assets / "model").get_text_config()
    assert model.rope_parameters["rope_theta"] == 1e4
    assert all(torch.equal(value, weights(start)[name]) for name, value in weights(tiny_assets / "model").items())


STEPS = (StepMetrics(step=1, loss=4.0, tokens=10, step_s=1.5), StepMetrics(step=2, loss=3.0, tokens=20, step_s=0.5))


class Trains:
    """In the place of a training: leaves what a run leaves, and stops before the end of the stages named."""

    def __init__(self, *stopped: str) -> None:
        self.begun: list[str] = []
        self.models: list[str] = []
        self._stopped = stopped

    def __call__(self, prepared: Config) -> None:
        run_dir = Path(prepared.run_dir)
        self.begun.append(run_dir.name)
        self.models.append(prepared.text.model_name)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(asdict(step)) + "\n" for step in STEPS))
        (run_dir / "config.yaml").write_text(yaml.safe_dump(asdict(prepared)))
        checkpoint = Path(str(prepared.training.checkpoint_dir)) / "step_2"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "checkpoint.json").write_text("{}")
        if run_dir.name in self._stopped:
            raise KeyboardInterrupt
        (run_dir / "summary.json").write_text('{"status": "completed"}')


@pytest.fixture
def two_stages(tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A second stage begins with a copy of the tiny model, whatever was trained before it."""
    model = tiny_assets / "model"
    monkeypatch.setattr("dhp.trainer.curriculum.export_whole", lambda _, folder, **more: shutil.copytree(model, folder))
    config = compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}"])
    config.stages = {"one": StageEntry("alignment"), "two": StageEntry("pretraining", rope_theta=7e4)}
    return config


def run_all(config: Config, *stopped: str) -> tuple[Trains, list[str]]:
    trains, said = Trains(*stopped), list[str]()
    with suppress(KeyboardInterrupt):
        run_curriculum(config, trains, said.append)
    return trains, said


def test_checkpoints_may_lie_elsewhere_and_so_do_the_models_that_stages_begin_with(
    two_stages: Config, tmp_path: Path
) -> None:
    two_stages.training.checkpoint_dir = str(tmp_path / "shared")
    trains, _ = run_all(two_stages)
    assert trains.begun == ["1_one", "2_two"]
    assert trains.models[1] == str(tmp_path / "shared" / "2_two" / "start")
    told = json.loads((tmp_path / "run" / "stages.json").read_text())
    assert told["1_one"]["checkpoint"] == str(tmp_path / "shared" / "1_one" / "step_2")
    assert run_all(two_stages)[0].begun == []
    two_stages.overwrite = True
    with pytest.raises(ConfigError, match=r"shared/1_one holds files of another training, with which stage 1 of 2"):
        run_curriculum(two_stages, Trains(), lambda _: None)
    assert (tmp_path / "run" / "1_one").is_dir()


def test_the_record_tells_of_each_stage_what_its_steps_were(two_stages: Config, tmp_path: Path) -> None:
    run_all(two_stages)
    for told in json.loads((tmp_path / "run" / "stages.json").read_text()).values():
        assert (told["steps"], told["tokens"], told["seconds"]) == (2, 30, 2.0)
        assert (told["first_loss"], told["last_loss"]) == (4.0, 3.0)


def test_overwriting_begins_anew_with_stages_that_never_ended_too(two_stages: Config, tmp_path: Path) -> None:
    _, said = run_all(two_stages, "2_two")
    assert said[-1] == "the curriculum stops in stage 2, two; the same command with this run_dir goes on there"
    own = tmp_path / "run" / "mine.txt"
    own.touch()
    assert run_all(two_stages)[0].begun == ["2_two"]
    run_all(replace(two_stages, overwrite=True), "1_one")
    assert not (tmp_path / "run" / "2_two").exists() and own.exists()
    trains, said = run_all(replace(two_stages, overwrite=True), "2_two")
    assert trains.begun == ["1_one", "2_two"]
    assert said[-1].endswith("the same command with this run_dir and overwrite=false goes on there")


def test_a_course_that_is_going_on_is_left_as_it_is(two_stages: Config, tmp_path: Path) -> None:
    run_all(two_stages, "2_two")
    with locked(tmp_path / "run", "run_dir"):
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match=f"run_dir={tmp_path / 'run'} is in use"):
                run_all(replace(two_stages, overwrite=overwrite))
        assert (tmp_path / "run" / "1_one" / "summary.json").is_file()
    assert run_all(two_stages)[0].begun == ["2_two"]


def test_overwriting_removes_nothing_that_the_course_reads(two_stages: Config, tmp_path: Path) -> None:
    run_all(two_stages)
    two_stages.overwrite = True
    two_stages.text.model_name = two_stages.vision.model_name = str(tmp_path / "run" / "2_two" / "start")
    with pytest.raises(ConfigError, match=r"model_name=\S+/2_two/start lies in \S+/2_two, which is removed"):
        run_curriculum(two_stages, Trains(), lambda _: None)
    assert (tmp_path / "run" / "2_two" / "start").is_dir()


def test_a_stage_that_has_begun_keeps_its_positions(two_stages: Config, tmp_path: Path) -> None:
    run_all(two_stages, "2_two")
    two_stages.stages["two"].rope_theta = 8e4
    folder = tmp_path / "run" / "2_two"
    told = rf"stages.two.rope_theta=80000.0, and the stage in {folder} began with 70000.0. .* or remove {folder} to"
    with pytest.raises(ConfigError, match=told):
        run_curriculum(two_stages, Trains(), lambda _: None)
    shutil.rmtree(folder)
    assert run_all(two_stages)[0].begun == ["2_two"]
    start = AutoConfig.from_pretrained(folder / "start").get_text_config()
    assert start.rope_parameters["rope_theta"] == 8e4


def test_an_earlier_stage_is_not_trained_again_behind_a_later_ones_back(two_stages: Config, tmp_path: Path) -> None:
    run_all(two_stages, "2_two")
    one, two = tmp_path / "run" / "1_one", tmp_path / "run" / "2_two"
    shutil.rmtree(one / "checkpoints")  # the second has its own weights already
    assert run_all(two_stages)[0].begun == ["2_two"]
    shutil.rmtree(one)
    with pytest.raises(ConfigError, match=rf"stage 1 of 2, one, is to be .* and {two} has begun .* remove {two} "):
        run_curriculum(two_stages, Trains(), lambda _: None)
    shutil.rmtree(two)
    assert run_all(two_stages)[0].begun == ["1_one", "2_two"]


def test_the_last_stage_may_be_made_longer(two_stages: Config, tmp_path: Path) -> None:
    run_all(two_stages)
    two_stages.stages["two"].settings = {"training": {"max_steps": 9}}
    assert run_all(two_stages)[0].begun == ["2_two"]
    two_stages.stages["one"].settings = {"training": {"max_steps": 9}}
    with pytest.raises(ConfigError, match=r"its max_steps and num_epochs too"):
        run_curriculum(two_stages, Trains(), lambda _: None)


def test_places_below_the_home_directory_and_a_model_named_once(
    two_stages: Config, tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(tiny_assets / "model", tmp_path / "model")
    two_stages.run_dir, two_stages.tiny_assets = "~/course", None
    for entry in two_stages.data.data_registry.values():
        entry.annotation_path = str(tiny_assets / "data" / "annotations.json")
    two_stages.vision.model_name, two_stages.text.model_name = "~/model", ""
    two_stages.stages["one"].rope_theta = 6e4
    trains, _ = run_all(two_stages)
    assert trains.models == [str(tmp_path / "course" / name / "start") for name in ("1_one", "2_two")]
    assert (tmp_path / "course" / "stages.json").is_file()


def test_a_record_that_is_none_is_told(two_stages: Config, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stages.json").write_text("[1")
    with pytest.raises(ConfigError, match=r"stages.json is no record of training stages \(.*restore it"):
        run_curriculum(two_stages, Trains(), lambda _: None)


SAMPLES = 256  # of the embedded default's dataset
SETTINGS = [
    *("data.balance=balanced", "data.num_workers=2", "training.batch_size=32", "training.micro_batch_size=4"),
    *("vision.num_actors=1", "vision.parallelism=none", "vision.zero_stage=0"),
    *("text.num_actors=2", "text.parallelism=data"),
    *("training.max_steps=null", "training.num_epochs=2", "training.save_steps=5", "training.warmup_ratio=0"),
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("balanced") / "run"


@pytest.fixture(scope="module")
def settings(run_dir: Path) -> list[str]:
    return [*SETTINGS, f"data.cache_dir={run_dir.parent / 'cache'}"]


@pytest.fixture(scope="module")
def outcome(tiny_assets: Path, run_dir: Path, settings: list[str]) -> Outcome:
    return train(*tiny(tiny_assets, run_dir, *settings))


def lines_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_epochs_show_every_sample_twice_without_padding(outcome: Outcome, run_dir: Path) -> None:
    assert outcome.status == 0, outcome.stderr
    assert outcome.left == ()
    lines = lines_of(run_dir)
    assert sum(line["samples"] for line in lines) == 2 * SAMPLES
    assert sum(line["samples"] for line in lines if line["epoch"] <= 1) == SAMPLES
    assert lines[-1]["epoch"] == 2 and [line["skipped_samples"] for line in lines] == [0] * len(lines)
    assert {line["pad_ratio"] for line in lines} == {0}
    assert {line["samples"] for line in lines} != {32}  # packs by load, not by number
    of_text = [line["dist_ratio"]["text"] for line in lines]
    assert sorted(of_text)[len(of_text) // 2] < 0.05 and all(0 <= ratio < 1 for ratio in of_text)


@pytest.mark.slow
def test_a_run_stopped_in_mid_epoch_goes_on_with_the_samples_it_has_not_seen(
    outcome: Outcome, run_dir: Path, settings: list[str], tiny_assets: Path, tmp_path: Path
) -> None:
    stopped = tmp_path / "run"
    shutil.copytree(run_dir, stopped)
    for newer in (stopped / "checkpoints").iterdir():
        if newer.name != "step_5":
            shutil.rmtree(newer)
    # No worker this time: who reads changes nothing.
    resumed = train(*tiny(tiny_assets, stopped, *settings, "training.resume=auto", "data.num_workers=0"))
    assert resumed.status == 0, resumed.stderr
    for field in ("loss", "grad_norm", "tokens", "samples", "epoch", "dist_ratio"):
        assert [line[field] for line in lines_of(stopped)] == [line[field] for line in lines_of(run_dir)]
    # Lengths are measured once, by whichever run comes first.
    assert "measuring the samples' lengths: 0%" in outcome.stdout and "measuring" not in resumed.stdout


@pytest.mark.slow
def test_other_data_are_refused(
    outcome: Outcome, run_dir: Path, settings: list[str], tiny_assets: Path, tmp_path: Path
) -> None:
    stopped = tmp_path / "run"
    shutil.copytree(run_dir, stopped)
    overrides = [*tiny(tiny_assets, stopped, *settings, "training.resume=auto", "data.balance=isf")[1:]]
    with pytest.raises(CheckpointError, match="balance was balanced and is isf"):
        main(compose_config("tiny", overrides=overrides))
