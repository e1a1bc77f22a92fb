"""Secrets of the environment do not get into a configuration, which is written down and sent to loggers."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.config.command_line import compose_config
from dhp.core.errors import ConfigError


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:HF_TOKEN}",
        "${oc.env:HF_TOKEN,none}",
        "a/${oc.decode:${oc.env:WANDB_API_KEY}}",
        "${oc.env:MY_${oc.env:HALF}}",
        "${oc.env:my_password}",
        "${oc.env:AWS_SECRET}",
    ],
)
def test_a_secret_by_its_name_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("HF_TOKEN", "WANDB_API_KEY", "MY_SECRET_SAUCE", "my_password", "AWS_SECRET")
    for name in names:
        monkeypatch.setenv(name, "hf_value_of_it")
    monkeypatch.setenv("HALF", "SECRET_SAUCE")
    (tmp_path / "mine.yaml").write_text(f"name: '{text}'\n")
    for name, path, overrides in (("mine", str(tmp_path), []), ("tiny", None, [f"name='{text}'"])):
        with pytest.raises(ConfigError, match=r"name: \$\{oc\.env:.* is a secret by its name") as caught:
            compose_config(name, path, overrides)
        assert "hf_value_of_it" not in str(caught.value)


def test_other_variables_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch")
    (tmp_path / "mine.yaml").write_text("run_dir: ${oc.env:SCRATCH}/a\nname: ${oc.env:NOT_SET,b}\n")
    config = compose_config("mine", str(tmp_path))
    assert (config.run_dir, config.name) == ("/scratch/a", "b")
    (tmp_path / "mine.yaml").write_text("name: ${oc.env:NOT_SET}\n")
    with pytest.raises(ConfigError, match="Environment variable 'NOT_SET' not found"):
        compose_config("mine", str(tmp_path))
