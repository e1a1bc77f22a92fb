"""A YAML file is data: attacks through Hydra's own section, with what they would have done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dhp.config.command_line import compose_config, hydra_entry
from dhp.core.errors import ConfigError

FILE = "{{class: logging.FileHandler, filename: {file}}}"
WRITES = f"{{{{version: 1, root: {{{{handlers: [e]}}}}, handlers: {{{{e: {FILE}}}}}}}}}"
ATTACKS = {
    "a callback": "hydra: {{callbacks: {{e: {{_target_: pathlib.Path, _args_: [x]}}}}}}",
    "a call": "hydra: {{callbacks: {{e: {{_target_: builtins.open, file: {file}, mode: w}}}}}}",
    "the environment": "hydra: {{job: {{env_set: {{EVIL_SET: '1'}}}}}}",
    "a log": f"hydra: {{{{job_logging: {WRITES}}}}}",
    "a log by header": f"# @package hydra.job_logging\n{WRITES}",
    "a section that is none": "hydra: null",
    "a dotted key": "hydra.job.chdir: true",
    "swept": "hydra: {{mode: MULTIRUN, sweeper: {{params: {{hydra.job.name: 'a,b'}}}}}}",
    "a group's package": "defaults: [_self_, text@hydra.callbacks: evil]",
    "a group's package by a name": "defaults: [_self_, 'text@${{oc.env:PACKAGE}}': evil]",
    "a part of Hydra": "defaults: [_self_, override hydra/job_logging: default]",
    "a file named for Hydra": "defaults: [_self_, other/hydra]",
    "constructed deep in a value": "data: {{data_registry: {{a: {{columns: {{images: {{_target_: os.system}}}}}}}}}}",
    "constructed in a list": "stages: {{a: {{settings: {{a: [{{'()': os.system}}]}}}}}}",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_cannot_make_hydra_do_anything(
    attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    monkeypatch.setenv("PACKAGE", "hydra.callbacks")
    monkeypatch.delenv("EVIL_SET", raising=False)
    written = tmp_path / "PWNED"
    (tmp_path / "mine.yaml").write_text(ATTACKS[attack].format(file=json.dumps(str(written))) + "\n")
    for name, text in {
        "text/evil": "e: {_target_: os.getcwd}",
        "other/hydra": "# @package _name_\nverbose: true",
    }.items():
        (tmp_path / f"{name}.yaml").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text + "\n")
    seen: list[object] = []
    with pytest.raises(SystemExit):
        hydra_entry(seen.append, [str(tmp_path / "mine.yaml")])
    said = capsys.readouterr().err
    assert said.startswith("ConfigError: ") and "A YAML file is data here" in said
    assert not seen and not written.exists()
    with pytest.raises(ConfigError, match="A YAML file is data here"):
        compose_config("mine", str(tmp_path))


def test_a_file_may_say_over_what_a_sweep_goes(tmp_path: Path) -> None:
    sweep = "hydra: {mode: MULTIRUN, sweep: {dir: a, subdir: b}, sweeper: {params: {seed: '1,2'}}}\nseed: 3\n"
    (tmp_path / "mine.yaml").write_text(sweep)
    assert compose_config("mine", str(tmp_path)).seed == 3
    seen: list[int] = []
    hydra_entry(lambda config: seen.append(config.seed), [str(tmp_path / "mine.yaml"), f"hydra.sweep.dir={tmp_path}/s"])
    assert seen == [1, 2]


def test_a_file_that_unpickles_is_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--experimental-rerun", "--experimental-r", "--ex"):
        with pytest.raises(SystemExit):
            hydra_entry(lambda _: None, ["--config-name=tiny", flag, "job.pickle"])
        assert f"{flag} is no flag" in capsys.readouterr().err
