"""Commands that keep nothing leave nothing, also when they are refused or interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.__main__ import main
from dhp.config.schema import Config
from dhp.core.errors import ConfigError, PartFailed

COMMANDS = {
    "evaluate": (["evaluate", "loss", "somewhere"], "dhp.trainer.evaluation.evaluate"),
    "generate": (["generate", "prompt=x", "checkpoint=somewhere"], "dhp.trainer.generation.generate"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("error", "status", "stays"),
    [(ConfigError("no"), 1, False), (KeyboardInterrupt(), 130, False), (PartFailed("rank 1 died"), 1, True)],
)
def test_what_stays_of_a_command(
    command: str,
    error: BaseException,
    status: int,
    stays: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(config: Config, *_: object) -> None:
        (Path(config.run_dir) / "logs").mkdir()
        (Path(config.run_dir) / "logs" / "text.0.log").write_text("what an actor said")
        raise error

    arguments, called = COMMANDS[command]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(called, fail)
    monkeypatch.setattr("dhp.cli.evaluate.find_configuration", lambda _: (Config(), None))
    monkeypatch.setattr("dhp.cli.generate._configuration", lambda *_: (Config(), None))
    monkeypatch.setattr(f"dhp.cli.{command}.heed", lambda: None)  # pytest's own handlers stay
    assert main(arguments) == status
    left = [path.name for path in tmp_path.glob("dhp-*")]
    assert bool(left) is stays
    assert f"the actors' logs stay in {tmp_path / left[0]}" in capsys.readouterr().err if stays else True


@pytest.mark.parametrize("command", [["doctor", "model"], ["export", "out"]])
def test_a_plugin_that_is_not_there_is_told_by_its_option(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(tmp_path), "--plugin", "my_familly"]) == 1
    assert "ModelError: --plugin=my_familly: there is no module my_familly here." in capsys.readouterr().err
