"""YAML and overrides in-process: what they mean, and what a mistake is answered with."""

import re

import pytest

from dhp.config.command_line import compose_config, to_yaml
from dhp.config.data import DatasetEntry
from dhp.config.schema import Config
from dhp.core.errors import ConfigError


def test_the_shipped_default_run_is_read_with_its_interpolations():
    config = compose_config("tiny")
    assert isinstance(config, Config)
    assert config.text.model_name == "assets/tiny/model"
    assert config.data.data_registry["shapes"].annotation_path == "assets/tiny/data/annotations.json"
    assert config.run_dir.startswith("runs/tiny-20")
    assert (config.vision.parallelism, config.text.parallelism) == ("sequence", "tensor")


def test_overrides_and_references_to_other_keys():
    config = compose_config("tiny", overrides=["tiny_assets=/a b", "seed=3", "training.learning_rate=1e-4"])
    assert config.vision.model_name == "/a b/model"
    assert (config.seed, config.training.learning_rate) == (3, 1e-4)


def test_plus_sets_and_tilde_returns_to_the_default():
    overrides = ["+training.max_steps=5", "++seed=4", "~training.warmup_steps", "~name", "~training.log_interval"]
    config = compose_config("tiny", overrides=overrides)
    assert (config.training.max_steps, config.seed, config.training.warmup_steps) == (5, 4, None)
    assert (config.name, config.training.log_interval) == ("run", 1)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.data_registry.mine.annotation_path=x.json", "+data.data_registry.mine.data_path='a, b'"],
        ["+data.data_registry.mine={annotation_path: x.json, data_path: 'a, b'}"],
        ["data.data_registry={mine: {annotation_path: x.json, data_path: 'a, b'}}"],
    ],
)
def test_datasets_are_added_from_the_command_line(overrides):
    registry = compose_config("tiny", overrides=overrides).data.data_registry
    assert registry["mine"] == DatasetEntry("x.json", "a, b")
    assert "shapes" in registry


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.data_registry.shapes.columns.images=photos", "+data.data_registry.shapes.columns.messages=dialogue"],
        ["data.data_registry.shapes.columns={images: photos, messages: dialogue}"],
    ],
)
def test_columns_are_named_from_the_command_line(overrides):
    entry = compose_config("tiny", overrides=overrides).data.data_registry["shapes"]
    assert entry.columns == {"images": "photos", "messages": "dialogue"}
    assert entry.annotation_path == "assets/tiny/data/annotations.json"


def test_columns_in_a_yaml(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "data:\n  datasets: [a]\n  data_registry:\n    a: {annotation_path: x, columns: {images: photos}}\n"
    )
    assert compose_config("mine", str(tmp_path)).data.data_registry["a"].columns == {"images": "photos"}


def test_datasets_are_removed_from_the_command_line():
    assert compose_config("tiny", overrides=["~data.data_registry.shapes"]).data.data_registry == {}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.batchsize=2", "training.batchsize is not a key; did you mean training.batch_size?"),
        ("+training.batchsize=2", "training.batchsize is not a key; did you mean training.batch_size?"),
        ("~training.batchsize", "training.batchsize is not a key; did you mean training.batch_size?"),
        ("trainig.batch_size=2", "trainig.batch_size is not a key; did you mean training.batch_size?"),
        (
            "num_actors=2",
            "num_actors is not a key; did you mean vision.num_actors or audio.num_actors or text.num_actors?",
        ),
        (
            "data.data_registry.a.path=x",
            "data.data_registry.a.path is not a key; did you mean data.data_registry.a.data_path?",
        ),
        (
            "data.data_registry.a.columns=x",
            "data.data_registry.a.columns is of the wrong type; expected a mapping such as {images: photos}",
        ),
        ("vision.zzz=1", "vision.zzz is not a key; vision has model_name, parallelism, num_actors"),
        ("zzz=1", "zzz is not a key; the top level has name, run_dir"),
        ("training={batchsize: 2}", "training.batchsize is not a key; did you mean training.batch_size?"),
        ("training.batch_size=abc", "training.batch_size=abc is of the wrong type; expected a whole number"),
        ("training.batch_size=1.5", "training.batch_size=1.5 is of the wrong type; expected a whole number"),
        ("training.learning_rate=fast", "training.learning_rate=fast is of the wrong type; expected a number"),
        ("training.max_steps=x", "training.max_steps=x is of the wrong type; expected a whole number or null"),
        ("training.batch_size=null", "training.batch_size is of the wrong type; expected a whole number"),
        ("overwrite=maybe", "overwrite=maybe is of the wrong type; expected true or false"),
        ("data.datasets=shapes", "data.datasets is of the wrong type; expected a list such as [first, second]"),
        ("training.betas=[a, b]", "training.betas[0]=a is of the wrong type; expected a list such as [0.9, 0.999]"),
        ("tiny_assets=${nowhere}", "Interpolation key 'nowhere' not found; check the name inside ${...}"),
        ("hydra.job.nam=x", "hydra.job.nam: Key 'nam' not in 'JobConf'"),
        ("seed=1,2", "Ambiguous value for argument 'seed=1,2'"),
        ("training.betas=[1", "'training.betas=[1' is not an override"),
        ("seed", "'seed' is not an override"),
    ],
)
def test_a_mistaken_override_is_named_with_its_remedy(override, message):
    with pytest.raises(ConfigError) as caught:
        compose_config("tiny", overrides=[override])
    assert message in str(caught.value)


def test_all_wrong_keys_are_told_at_once(tmp_path):
    yaml = "lr: 1\ntraining: {batchsize: 2, epochs: 3}\nvision: {dtype: bfloat16}\nzzz: {a: 1}\n"
    (tmp_path / "mine.yaml").write_text(yaml)
    overrides = ["training.deepspeed=x", "seed", "training={stepz: 1, max_step: 2}", "training.max_steps=3"]
    with pytest.raises(ConfigError) as caught:
        compose_config("mine", str(tmp_path), overrides)
    told = str(caught.value).splitlines()
    for line, part in zip(
        told[1:],
        (
            "in mine.yaml: lr is not a key; here it is training.learning_rate",
            "in mine.yaml: training.batchsize is not a key; did you mean training.batch_size?",
            "in mine.yaml: training.epochs is not a key; here it is training.num_epochs",
            "in mine.yaml: zzz is not a key",
        ),
    ):
        assert line.strip().startswith(part)
    rest = "\n".join(told[5:])
    for part in ("'seed' is not an override", *(f"training.{k} is not" for k in ("deepspeed", "stepz", "max_step"))):
        assert part in rest
    assert told[0].endswith("things are wrong:")


def test_a_yaml_needs_no_defaults_list_and_may_extend_a_shipped_one(tmp_path):
    (tmp_path / "plain.yaml").write_text("training:\n  batch_size: 3\n")
    (tmp_path / "mine.yaml").write_text("defaults:\n  - tiny\n  - _self_\nname: mine\n")
    plain, mine = compose_config("plain", str(tmp_path)), compose_config("mine.yaml", str(tmp_path))
    assert (plain.training.batch_size, plain.training.betas) == (3, [0.9, 0.999])
    assert (mine.name, mine.training.max_steps) == ("mine", 60)


def test_shipped_configs_stay_reachable_and_a_users_own_comes_first(tmp_path):
    assert compose_config("tiny", str(tmp_path)).name == "tiny"
    (tmp_path / "tiny.yaml").write_text("name: other\n")
    assert compose_config("tiny", str(tmp_path)).name == "other"


def test_config_path_is_relative_to_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text("seed: 9\n")
    monkeypatch.chdir(tmp_path)
    assert compose_config("mine", "conf").seed == 9


def test_a_config_group_is_selected_by_name(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "wide.yaml").write_text("num_actors: 4\n")
    assert compose_config("tiny", str(tmp_path), ["+text=wide"]).text.num_actors == 4


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("training:\n  batchsize: 3\n", "in bad.yaml: training.batchsize is not a key; did you mean training.batch_"),
        ("trainig:\n  batch_size: 3\n", "in bad.yaml: trainig is not a key; did you mean training?"),
        ("training:\n  batch_size: x\n", "in bad.yaml: training.batch_size=x is of the wrong type"),
        ("data:\n  data_registry:\n    a:\n      path: x\n", "did you mean data.data_registry.a.data_path?"),
        ("- a list\n", "in bad.yaml:"),
        ("a: [1\nb: c: d\n", 'not valid YAML: while parsing a flow sequence in "{file}", line 1'),
        ("defaults:\n  - nothing\n", "In 'bad': Could not"),
    ],
)
def test_a_mistake_in_a_yaml_names_the_file(tmp_path, yaml, message):
    file = tmp_path / "bad.yaml"
    file.write_text(yaml)
    with pytest.raises(ConfigError) as caught:
        compose_config("bad", str(tmp_path))
    assert message.replace("{file}", str(file)) in str(caught.value)


def test_an_unknown_config_lists_what_exists_and_the_nearest(tmp_path):
    (tmp_path / "mine.yaml").write_text("")
    with pytest.raises(ConfigError) as caught:
        compose_config("tinny", str(tmp_path))
    text = str(caught.value)
    assert "--config-name=tinny does not exist; did you mean tiny?" in text
    assert str(tmp_path) in text
    assert (
        "found: five_stages_tiny, mine, needle_tiny, qwen2_5_vl_32b, qwen2_5_vl_32b_8gpus, "
        "qwen2_5_vl_32b_8gpus_tensor, qwen2_5_vl_3b, qwen2_5_vl_72b, qwen2_5_vl_72b_32gpus, qwen2_5_vl_7b, "
        "qwen2_5_vl_7b_tensor, tiny" in text
    )


def test_an_unknown_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--config-path=.*nowhere is not a directory"):
        compose_config("tiny", str(tmp_path / "nowhere"))


def test_a_file_given_for_a_name_is_told_with_the_flags_that_use_it(tmp_path, monkeypatch):
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "mine.yaml").write_text("seed: 9\n")
    monkeypatch.chdir(tmp_path)
    for name in ("my/mine.yaml", "my/mine"):
        with pytest.raises(ConfigError, match="name, not a path(?s:.)*--config-path=my --config-name=mine$"):
            compose_config(name)


@pytest.mark.parametrize("override", ["vision=ulyses_zero1", "+vision=ulyses_zero1"])
def test_a_choice_that_is_none_is_told_with_all_there_are(override):
    with pytest.raises(ConfigError) as caught:
        compose_config("qwen2_5_vl_3b", overrides=[override])
    told = str(caught.value)
    assert told.startswith(
        "vision=ulyses_zero1 does not exist; choose from data, data_zero1, data_zero3, pipeline, ring"
    )
    assert told.endswith("ulysses, ulysses_zero1, ulysses_zero3; did you mean ulysses_zero1?")


def test_a_choice_in_a_yaml_that_is_none_is_told_without_hydras_search_path(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults:\n  - vision: nosuch\n  - _self_\n")
    with pytest.raises(ConfigError) as caught:
        compose_config("mine", str(tmp_path))
    assert "ulysses_zero1" in str(caught.value) and "search path" not in str(caught.value)


def test_yaml_text_reads_back_to_an_equal_config(tmp_path):
    config = compose_config("tiny", overrides=["seed=5", "training.betas=[0.8,0.95]", "name='a: b'"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert compose_config("config", str(tmp_path)) == config
    assert "${" not in to_yaml(config)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "data: {data_registry: {no: {annotation_path: a.json}}}",
            "data.data_registry has a name that YAML takes for false",
        ),
        ("data: {datasets: [yes]}", "data.datasets has a name that YAML takes for true. Quote it, as 'yes'"),
    ],
)
def test_a_name_that_yaml_takes_for_a_boolean_is_told(tmp_path, text, told):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(told)):
        compose_config("mine", str(tmp_path))
