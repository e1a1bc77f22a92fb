"""Cuts by trials: what they run, what a run takes from them, and what it leaves alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dhp.config.command_line import compose_config, to_yaml
from dhp.config.resolve import resolve
from dhp.config.run_dir import read_recorded
from dhp.config.schema import Config
from dhp.core.errors import ConfigError, Fault, PartFailed
from dhp.plan.cut.trials import TrialStep, UnitTimes
from dhp.trainer import tried_cuts
from tests.helpers.runs import FIRST, tiny, train
from tests.trainer.test_run_loop import losses

CHAIN = (
    *("cluster.chain=true", "training.schedule=1f1b", "text.parallelism=pipeline", "text.num_actors=3"),
    *("vision.parallelism=pipeline", "vision.num_actors=2", "vision.zero_stage=0"),
)
PIPELINE = ("text.parallelism=pipeline", "text.num_actors=2", "training.batch_size=16", "training.schedule=1f1b")
TRIALS = ("text.partition=bmp", "text.partition_candidates=2", "text.partition_trials=true")


def config_of(model: str, run_dir: Path, *overrides: str) -> Config:
    names = [f"{part}.model_name={model}" for part in ("vision", "text")]
    given = [*names, f"run_dir={run_dir}", "cluster.device=cpu", *PIPELINE, *overrides]
    return resolve(compose_config("tiny", overrides=given))


Steps = Callable[[Config], list[TrialStep]]


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Config], list[Steps]]:
    """The configurations that were tried; what answers them, which a test adds."""
    seen: list[Config] = []
    answers: list[Steps] = []

    def take(trial: Any, cuts: Any, steps: int) -> list[TrialStep]:
        seen.append(trial._config(cuts))
        return answers[0](seen[-1])

    monkeypatch.setattr(tried_cuts._Trial, "_steps", take)
    return seen, answers


def tried(config: Config, said: list[str]) -> Config:
    return tried_cuts.with_tried_cuts(config, said.append)


EVEN = {"text": tuple(UnitTimes(1.0, 2.0) for _ in range(6)), "vision": (UnitTimes(1.0, 1.0),) * 4}


def test_trials_are_short_runs_beside_the_run(four_layers_model: str, tmp_path: Path, trials: Any) -> None:
    seen, answers = trials
    answers.append(lambda config: [TrialStep(1.0 + (config.text.cuts or [0])[0], EVEN)])
    config = config_of(four_layers_model, tmp_path / "run", *TRIALS, "training.resume=auto", "training.save_steps=1")
    said: list[str] = []
    found = tried(config, said)
    assert seen[0].text.cuts is None and len({tuple(one.text.cuts) for one in seen[1:]}) == 2
    assert {one.training.max_steps for one in seen} == {config.training.max_steps}
    assert {one.training.resume for one in seen} == {"never"} and not any(one.text.partition_trials for one in seen)
    assert all(one.memory.accounting and one.training.checkpoint_dir is None for one in seen)
    assert len({one.run_dir for one in seen}) == 3 and not any(Path(one.run_dir) == tmp_path / "run" for one in seen)
    assert list(tmp_path.iterdir()) == []  # the run's folder is not made, and trials' are gone
    assert len(found.text.cuts or []) == 1 and found.text.partition is None and not found.text.partition_trials
    assert replace(found, text=config.text) == config  # nothing else is changed
    assert resolve(found) is not None and any("text.cuts=" in line and "bmp" in line for line in said)


def test_a_candidate_out_of_memory_is_left_out(four_layers_model: str, tmp_path: Path, trials: Any) -> None:
    _, answers = trials

    def answer(config: Config) -> list[TrialStep]:
        if config.text.cuts == [2]:
            raise PartFailed("out of memory", Fault(who="text.0 rank 0", short=True))
        return [TrialStep(1.0, EVEN)]

    answers.append(answer)
    said: list[str] = []
    found = tried(config_of(four_layers_model, tmp_path / "run", *TRIALS), said)
    assert found.text.cuts not in (None, [2]) and any("does not fit: out of memory" in line for line in said)


def test_a_candidate_that_a_device_has_no_room_for_is_left_out(
    four_layers_model: str, tmp_path: Path, trials: Any
) -> None:
    _, answers = trials

    def answer(config: Config) -> list[TrialStep]:
        if config.text.cuts == [2]:
            raise ConfigError("the stages on one GPU keep 90 GiB")
        return [TrialStep(1.0, EVEN)]

    answers.append(answer)
    said: list[str] = []
    found = tried(config_of(four_layers_model, tmp_path / "run", *TRIALS), said)
    assert found.text.cuts not in (None, [2]) and any("does not fit: the stages on one GPU" in line for line in said)


def test_a_run_of_one_step_has_none_for_trials(four_layers_model: str, tmp_path: Path, trials: Any) -> None:
    trials[1].append(lambda config: [])
    with pytest.raises(ConfigError, match="takes two steps at least"):
        tried(config_of(four_layers_model, tmp_path / "run", *TRIALS), [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("stages", "takes"), [(2, True), (3, False)])
def test_cuts_of_the_run_that_goes_on_are_taken_where_they_fit(
    four_layers_model: str, tmp_path: Path, trials: Any, stages: int, takes: bool
) -> None:
    (tmp_path / "run" / "checkpoints" / "step_1").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step_1" / "checkpoint.json").write_text("{}")
    trials[1].append(lambda config: [TrialStep(1.0, EVEN)])
    given = [*TRIALS, "training.resume=auto", f"text.num_actors={stages}"]
    config = config_of(four_layers_model, tmp_path / "run", *given)
    cut = replace(config, text=replace(config.text, cuts=[3], partition=None, num_actors=2, pipeline=2))
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(cut))
    found = tried(config, [])
    assert (found.text.cuts == [3]) == takes and bool(trials[0]) == (not takes)
    assert len(found.text.cuts or []) == stages - 1


def test_other_faults_end_it(four_layers_model: str, tmp_path: Path, trials: Any) -> None:
    _, answers = trials

    def answer(config: Config) -> list[TrialStep]:
        raise PartFailed("a bug", Fault(who="text.0 rank 0"))

    answers.append(answer)
    with pytest.raises(PartFailed, match="a bug"):
        tried(config_of(four_layers_model, tmp_path / "run", *TRIALS), [])


def test_without_trials_nothing_runs(four_layers_model: str, tmp_path: Path, trials: Any) -> None:
    config = config_of(four_layers_model, tmp_path / "run", "text.partition=bmp")
    assert tried(config, []) is config and not trials[0]


@pytest.mark.slow
def test_a_run_has_the_cuts_of_its_trials_and_a_resumed_one_keeps_them(tiny_assets: Path, tmp_path: Path) -> None:
    own = tiny(tiny_assets, tmp_path / "run", *FIRST, *CHAIN, *TRIALS, "training.resume=auto")
    assert (first := train(*own)).status == 0, first.stderr
    assert first.stdout.count("trial ") >= 3 and [one.name for one in tmp_path.iterdir()] == ["run"]
    cuts = {part: getattr(read_recorded(tmp_path / "run" / "config.yaml"), part).cuts for part in ("vision", "text")}
    assert len(cuts["vision"]) == 1 and len(cuts["text"]) == 2
    again = train(*own, "training.max_steps=4")
    assert again.status == 0 and "those of the run that is resumed" in again.stdout, again.stderr
    assert "trial 1" not in again.stdout
    by_hand = [f"{part}.cuts=[{','.join(map(str, of))}]" for part, of in cuts.items()]
    assert train(*tiny(tiny_assets, tmp_path / "other", *FIRST, *CHAIN, *by_hand)).status == 0
    of_trials, of_hand = (losses(tmp_path / name) for name in ("run", "other"))
    assert of_trials[:3] == of_hand and len(of_trials) == 4
