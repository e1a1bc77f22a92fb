"""What --help KEY prints: the schema's own words, for one key and for a section."""

import pytest

from dhp.config.command_line import key_help
from dhp.config.keys import schema_keys
from dhp.config.yaml_files import ConfigSource
from dhp.core.errors import ConfigError

SHIPPED = ConfigSource.find(None, None)


def shown(*paths: str) -> list[str]:
    """Paragraphs, each on one line."""
    return [" ".join(part.split()) for part in key_help(paths, SHIPPED).split("\n\n")]


def test_a_key_has_its_type_default_and_meaning():
    key = schema_keys()["data.balance"]
    assert shown("data.balance") == [f"data.balance: text; default `random` {key.doc}"]
    assert max(map(len, key_help(["data.balance"], SHIPPED).splitlines())) <= 110


def test_a_section_has_all_its_keys_and_its_configurations():
    lines = shown("text")
    assert lines[0].startswith(
        "text: a section of keys; text=NAME takes a configuration: data, data_zero2, data_zero3, "
    )
    told = [line.partition(": ")[0] for line in lines]
    assert told == [path for path in schema_keys() if path == "text" or path.startswith("text.")]
    assert "text.lora.rank" in told and "text.pipeline" in told


@pytest.mark.parametrize(
    ("path", "beginning"),
    [
        ("data.data_registry.mine.weight", "data.data_registry.<name>.weight: a number; default `1.0` How often"),
        ("training.betas", "training.betas: a list such as [0.9, 0.999]; default `[0.9, 0.999]` "),
        ("cluster.threads_per_actor", "cluster.threads_per_actor: a whole number or null; default `null` "),
        ("data.data_registry.mine.data_path", "data.data_registry.<name>.data_path: text; default to be set "),
        ("stages.first.settings.training.learning_rate", "stages.<name>.settings.training.learning_rate: a number; "),
    ],
)
def test_keys_of_all_kinds(path, beginning):
    (line,) = shown(path)
    assert line.startswith(beginning)


def test_several_at_once():
    assert [line.partition(":")[0] for line in shown("seed", "name")] == ["seed", "name"]


def test_what_is_no_key_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"^balance is not a key; did you mean data\.balance\?$"):
        shown("balance")
    with pytest.raises(ConfigError) as caught:
        shown("data.balanse", "seed", "lora_rank")
    assert str(caught.value).splitlines() == [
        "2 things are wrong:",
        "  data.balanse is not a key; did you mean data.balance?",
        "  lora_rank is not a key; here it is vision.lora.rank and text.lora.rank (0: no LoRA)",
    ]
