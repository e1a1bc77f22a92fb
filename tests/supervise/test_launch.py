"""What each attempt of a supervised run is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.config.command_line import compose_config, same_command
from dhp.core.errors import ConfigError, PartFailed
from dhp.supervise.attempt import COMPLETED, INTERRUPTED, Attempt
from dhp.supervise.launch import changes, reporting
from dhp.supervise.supervisor import Begun

OPENED, SAVED = Begun(opened=True), Begun(opened=True, saved=True)


def asked(begun: Begun, *overrides: str, run_dir: str = "runs/one") -> dict[str, str]:
    config = compose_config("tiny", overrides=[f"run_dir={run_dir}", *overrides])
    found = changes(config, begun)
    assert found.pop("run_dir") == run_dir
    return found


@pytest.mark.parametrize("overrides", [(), ("overwrite=true",), ("training.resume=auto",), ("training.resume=/a/run",)])
def test_until_the_run_has_its_directory_an_attempt_is_as_the_first(overrides: tuple[str, ...]) -> None:
    assert asked(Begun(), *overrides) == {}


@pytest.mark.parametrize("overrides", [(), ("overwrite=true",), ("training.resume=auto",)])
def test_then_it_continues_and_replaces_nothing(overrides: tuple[str, ...]) -> None:
    for begun in (OPENED, SAVED):
        assert asked(begun, *overrides) == {"overwrite": "false", "training.resume": "auto"}


def test_a_run_that_began_with_anothers_checkpoint_begins_there_until_it_has_its_own() -> None:
    other = "training.resume=/another/run/checkpoints/step_4"
    assert asked(OPENED, other) == {"overwrite": "true", "training.resume": "/another/run/checkpoints/step_4"}
    assert asked(SAVED, other) == {"overwrite": "false", "training.resume": "auto"}


def test_a_checkpoint_in_the_run_itself_is_continued(tmp_path: Path) -> None:
    own = f"training.resume={tmp_path}/checkpoints/step_4"
    assert asked(OPENED, own, run_dir=str(tmp_path)) == {"overwrite": "false", "training.resume": "auto"}


def test_a_curriculum_goes_on_by_its_own_record() -> None:
    stages = "stages=[{name: a, training: {max_steps: 1}}]"
    config = compose_config("tiny", overrides=["run_dir=runs/one"])
    config.stages = [stages]  # type: ignore[list-item]
    assert changes(config, SAVED) == {"run_dir": "runs/one", "overwrite": "false"}


def test_the_command_line_names_the_same_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dhp.config.command_line.job_overrides", list)  # those of another test's job
    file = tmp_path / "my.yaml"
    file.write_text("name: mine\n")
    words = same_command([str(file), "seed=3"], {"run_dir": "runs/one"})
    assert words == [f"--config-path={tmp_path}", "--config-name=my", "run_dir='runs/one'"]
    monkeypatch.setattr("dhp.config.command_line.job_overrides", lambda: ["text.num_actors=4", "seed=3"])
    words = same_command([str(file)], {"run_dir": "x"}, ("text.num_actors=2", "text.cuts=[1]"))
    assert words[2:] == ["seed=3", "run_dir='x'", "text.num_actors=2", "text.cuts=[1]"]


@pytest.mark.parametrize("odd", ["plain", "it's, {odd} = 1\\2", "ends\\", "a\\'b"])
def test_any_path_is_read_back(odd: str) -> None:
    (override,) = [word for word in same_command(["--config-name=tiny"], {"run_dir": odd}) if word[:7] == "run_dir"]
    assert compose_config("tiny", overrides=[override]).run_dir == odd


def test_how_a_driver_ends_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def end(number: int, error: BaseException | None) -> Attempt:
        attempt = Attempt(str(tmp_path / str(number)), number, 0)
        with reporting(attempt):
            if error is not None:
                raise error
        return attempt

    verdict = end(1, None).verdict
    assert verdict is not None and verdict.kind == COMPLETED
    with pytest.raises(SystemExit) as ended:
        end(2, PartFailed("text rank 1 died"))
    assert ended.value.code == 75 and capsys.readouterr().err == "PartFailed: text rank 1 died\n"
    with pytest.raises(ConfigError):
        end(3, ConfigError("no"))
    with pytest.raises(SystemExit):
        end(4, SystemExit(130))
    verdict = Attempt(str(tmp_path / "4"), 4, 0).verdict
    assert verdict is not None and verdict.kind == INTERRUPTED
    with pytest.raises(ZeroDivisionError):
        end(5, ZeroDivisionError())
